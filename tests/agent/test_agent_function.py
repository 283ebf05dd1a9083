"""Agents of clients that were not changed, played by a policy in the loop: what they say is what it reads."""

from __future__ import annotations

import importlib.util
import json

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from scripted_engine import ScriptedEngine, byte_tokenizer, prompts

from verl.agent.agent import EnvironmentAgent
from verl.agent.trajectory import AgentConfig
from verl.environments.executors import Environments
from verl.protocol import object_array

HERE = "test_agent_function"
CONFIG = AgentConfig(
    9, max_start_length=600, max_prompt_length=2000, max_response_length=99, max_obs_length=200
)
heard: list = []  # what agents were answered


async def two_turns(task, base_url):
    """Asks, and asks again with the answer; its reward is a column of the row."""
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": f"Q: {task['question']}\n"}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="any", messages=messages, stop=["."])
        heard.append((reply.choices[0].message.content, reply.usage.total_tokens))
        messages += [reply.choices[0].message, {"role": "user", "content": "Sure?\n"}]
    return task["worth"]


def plain_function(task, base_url):
    """No coroutine; forgets what was said, and streams."""
    client = OpenAI(base_url=base_url, api_key="none")
    for text in ("first\n", "second\n"):
        parts = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": text}], stream=True
        )
        heard.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
    return 1.0


async def breaks(task, base_url):
    async with httpx.AsyncClient() as client:
        for body in (b"no json", b'{"messages": []}', b'{"messages": [1]}'):
            reply = await client.post(f"{base_url}/chat/completions", content=body)
            heard.append((reply.status_code, reply.json()["error"]["code"]))
        reply = await client.post(
            f"{base_url.replace('/sessions/', '/sessions/x')}/chat/completions",
            json={"messages": [{"role": "user", "content": "?"}]},
        )
        heard.append((reply.status_code, reply.json()["error"]["code"]))
    raise KeyError("the agent's own mistake")


async def with_tools(task, base_url):
    """The OpenAI Agents SDK, a tool of its own."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def search(query: str) -> str:
        """Looks something up."""
        return f"{query} is a town"

    model = OpenAIChatCompletionsModel("any", AsyncOpenAI(base_url=base_url, api_key="none"))
    result = await Runner.run(Agent(name="x", model=model, tools=[search]), task["prompt"], max_turns=4)
    heard.append(result.final_output)


def play(script, function: str, rows: list[dict], tool_format: str = "search_r1"):
    heard.clear()
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, script)
    settings = {"agent": {"function": f"{HERE}:{function}", "tool_format": tool_format}}
    agent = EnvironmentAgent(tokenizer, engine, CONFIG, Environments(None, settings))
    batch = prompts(tokenizer, ["unread"] * len(rows))
    episodes = [
        {"env_class": "agent", "prompt": row.pop("prompt", []), "extras": row} for row in map(dict, rows)
    ]
    batch.non_tensor_batch["episode"] = object_array(episodes)
    result = agent.run_llm_loop(batch)
    agent.close()
    return engine, tokenizer, result.non_tensor_batch["trajectory"]


def test_turns_are_appended_and_a_stop_string_is_not_said_to_the_client():
    rows = [{"question": name, "worth": worth} for name, worth in (("a", 0.25), ("b", 1.0))]
    engine, _, records = play(lambda prompt, turn: f"{prompt[3]}{turn}. More", "two_turns", rows)
    assert [record["finish_reason"] for record in records] == ["done", "done"]
    assert [record["env_reward"] for record in records] == [0.25, 1.0]
    assert sorted(heard) == [("a0", 8), ("a1", 17), ("b0", 8), ("b1", 17)]
    assert [call[0] for call in engine.calls].count("open") == 2 and "contexts" not in records[0]
    assert records[0]["policy_text"].count(".") == 2 and records[0]["turns"][0]["obs_end"] is not None
    assert records[0]["env_metrics"] == {"turns": 2}


def test_another_history_begins_another_context():
    engine, tokenizer, records = play(lambda prompt, turn: f"to {prompt}", "plain_function", [{}])
    (record,) = records
    assert heard == ["to first\n", "to second\n"] and record["env_reward"] == 1.0
    assert record["contexts"] == [record["turns"][0]["obs_start"]]
    assert [prompt for kind, _, prompt in engine.calls if kind == "open"] == ["first\n", "second\n"]


def test_mistakes_are_said_and_cost_the_episode_alone():
    _, _, (record,) = play(lambda *_: "x", "breaks", [{}])
    assert heard == [(400, "invalid_messages")] * 3 + [(404, "session_not_found")]
    assert record["finish_reason"] == "env_failed" and "the agent's own mistake" in record["env_error"]


@pytest.mark.skipif(importlib.util.find_spec("agents") is None, reason="openai-agents is not installed")
@pytest.mark.parametrize("tool_format", ["search_r1", "hermes"])
def test_an_agent_of_the_openai_sdk_calls_its_tools(tool_format):
    calls = {
        "search_r1": "\n\n<search> Bora </search>",
        "hermes": f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': 'Bora'}})}</tool_call>",
    }

    def script(prompt: str, turn: int) -> str:
        return "<answer> a town </answer>" if turn else calls[tool_format]

    prompt = [{"role": "user", "content": "What is Bora?\n"}]
    engine, tokenizer, (record,) = play(script, "with_tools", [{"prompt": prompt}], tool_format)
    assert heard == ["<answer> a town </answer>"] and record["finish_reason"] == "done"
    assert len(record["turns"]) == 2 and "contexts" not in record and record["env_reward"] is None
    read = engine.calls[0][2]
    assert ("Looks something up." in read) == (tool_format == "hermes")
    assert read.endswith("What is Bora?\n")


def test_settings_are_checked():
    for settings, said in (({}, "function=None"), ({"function": "json:loads", "tool_format": "x"}, "'x'")):
        env = Environments(None, {"agent": settings})
        with pytest.raises(ValueError, match=said):
            env["agent"].open({}, [], 0).result(10)
        env.close()
