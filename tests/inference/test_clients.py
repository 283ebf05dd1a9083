"""Clients that know nothing of us play episodes: what they get is kept as it was sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from served import NAME, tokenizer

KEY = "no key is asked for"
STOP = ["</search>", "</answer>"]


def checked_segments(server, session, num_turns):
    segments = server.segments(session)
    assert sum(len(segment["turns"]) for segment in segments) == num_turns
    for segment in segments:
        lengths = {len(segment[name]) for name in ("response_ids", "response_mask", "log_probs", "versions")}
        assert len(lengths) == 1
    return segments


def test_openai(server):
    openai = pytest.importorskip("openai")
    session, path = server.open()
    client = openai.OpenAI(base_url=f"{server.url}/sessions/{session}/v1", api_key=KEY)
    assert [model.id for model in client.models.list()] == [NAME]
    messages = [{"role": "user", "content": "Question: Who directed Amber Harbor?"}]
    for _ in range(3):
        reply = client.chat.completions.create(model=NAME, messages=messages, stop=STOP, max_tokens=20)
        messages += [
            reply.choices[0].message,
            {"role": "user", "content": "\n\n<information>x</information>\n\n"},
        ]
    chunks = list(client.chat.completions.create(model=NAME, messages=messages, max_tokens=20, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model=NAME, messages=messages, max_tokens=20)
    (segment,) = checked_segments(server, session, 5)
    assert segment["response_ids"][slice(*segment["turns"][3])] == chunks[-1].choices[0].token_ids
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "word " * 3000}])
    assert refused.value.code == "context_length_exceeded"
    completion = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY).completions.create(
        model=NAME, prompt="Question: ", max_tokens=5, stream=True
    )
    assert sum(len(chunk.choices[0].text) for chunk in completion)


@pytest.mark.slow  # its import
def test_litellm(server):
    litellm = pytest.importorskip("litellm")
    session, path = server.open()
    more = {"api_base": f"{server.url}/sessions/{session}/v1", "api_key": KEY, "max_tokens": 12, "seed": 4}
    messages = [{"role": "user", "content": "Question: Who directed Amber Harbor?"}]
    for _ in range(3):
        reply = litellm.completion(f"openai/{NAME}", messages, **more)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    pieces = list(litellm.completion(f"openai/{NAME}", messages, stream=True, **more))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    (segment,) = checked_segments(server, session, 4)
    assert text and pieces[-1].choices[0].finish_reason


def draw_a_call(server, monkeypatch):
    """The tiny model has never seen a call: the sampler's next draws are one. Returns its ids."""
    made = tokenizer(False)
    call = made.encode('<tool_call>{"name": "lookup", "arguments": {"query": "Amber Harbor"}}</tool_call>')
    call.append(made.eos_token_id)
    left = list(call)
    step = server.engine._runner.step

    def drawn(batch, rows):
        sampled = step(batch, rows)
        if left and len(sampled.token_ids):
            sampled.token_ids[0] = left.pop(0)
        return sampled

    monkeypatch.setattr(server.engine._runner, "step", drawn)
    return call


def test_smolagents(server, monkeypatch):
    smolagents = pytest.importorskip("smolagents")
    call = draw_a_call(server, monkeypatch)
    asked = []

    class Lookup(smolagents.Tool):
        name = "lookup"
        description = "Looks something up."
        output_type = "string"
        inputs = {"query": {"type": "string", "description": "what"}}

        def forward(self, query: str) -> str:
            asked.append(query)
            return "Mira Voss"

    session, path = server.open()
    model = smolagents.OpenAIModel(NAME, f"{server.url}/sessions/{session}/v1", KEY, max_tokens=100)
    agent = smolagents.ToolCallingAgent([Lookup()], model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Call tools."  # its own is longer than the tiny model's context
    agent.run("Who directed Amber Harbor?")
    assert asked[0] == "Amber Harbor"
    segments = server.segments(session)  # it tells the call in words of its own: a rewritten history
    assert segments[0]["response_ids"] == call and len(segments) > 1


def test_what_the_docs_name_for_openai_agents_is_there():
    """By default the SDK asks the Responses API, which no route answers."""
    agents = pytest.importorskip("agents")
    text = (Path(__file__).parents[2] / "docs" / "inference.md").read_text(encoding="utf-8")
    for name in ("OpenAIChatCompletionsModel", "set_default_openai_api"):
        assert f"`{name}(" in text and hasattr(agents, name)


def test_openai_agents(server, monkeypatch):
    agents = pytest.importorskip("agents")
    import openai

    call = draw_a_call(server, monkeypatch)
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def lookup(query: str) -> str:
        """Looks something up."""
        asked.append(query)
        return "Mira Voss"

    session, path = server.open()
    client = openai.AsyncOpenAI(base_url=f"{server.url}/sessions/{session}/v1", api_key=KEY)
    model = agents.OpenAIChatCompletionsModel(NAME, client)
    settings = agents.ModelSettings(max_tokens=100)
    agent = agents.Agent("tester", "Answer.", tools=[lookup], model=model, model_settings=settings)
    result = asyncio.run(agents.Runner.run(agent, "Who directed Amber Harbor?", max_turns=3))
    assert asked == ["Amber Harbor"] and isinstance(result.final_output, str)
    (segment,) = checked_segments(server, session, 2)  # the second turn extends the first
    assert segment["response_ids"][: len(call)] == call
    read = segment["response_ids"][len(call) : segment["turns"][1][0]]
    assert not any(segment["response_mask"][len(call) : segment["turns"][1][0]]) and read
