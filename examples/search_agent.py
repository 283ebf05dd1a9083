"""An agent of the OpenAI Agents SDK that searches. It is trained through the endpoint of its episodes.

bash train_grpo.sh --config configs/agent.yaml     needs the extra `agents`; see docs/environments.md

The agent knows nothing of training. It consists of a model, a tool and `Runner.run`. The shipped tiny model
writes calls with Search-R1's tags, as `tool_format: search_r1` says.
"""

import os
from contextlib import suppress
from typing import Any

import httpx
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

RETRIEVER_URL = os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8000/retrieve")
set_tracing_disabled(True)
_http = httpx.AsyncClient(timeout=60, trust_env=False)  # one for all episodes


@function_tool(failure_error_function=None)  # a failed search ends the episode, which leaves the batch
async def search(query: str) -> str:
    """Look up a query in the encyclopedia."""
    request = {"queries": [query], "topk": 2, "return_scores": True}
    reply = (await _http.post(RETRIEVER_URL, json=request)).raise_for_status()
    texts = [hit["document"]["contents"].partition("\n") for hit in reply.json()["result"][0]]
    return "\n".join(f"Doc {n}(Title: {title}) {text}" for n, (title, _, text) in enumerate(texts, 1))


async def run(task: dict[str, Any], base_url: str) -> None:
    """Play one episode. It returns nothing, because the run's reward function reads the answer."""
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=_http, max_retries=0)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="searcher", model=model, tools=[search])
    with suppress(MaxTurnsExceeded):
        await Runner.run(agent, task["prompt"], max_turns=4)
