"""Agents of clients that were not changed, played by a policy in the loop: what they say is what it reads."""

from __future__ import annotations

import importlib.util
import json
import time

import httpx
import pytest
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


def openai_client(base_url):
    from openai import OpenAI  # here, since its import takes seconds in each process of the tests

    return OpenAI(base_url=base_url, api_key="none")


def async_openai_client(base_url):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="none")


async def two_turns(task, base_url):
    """Asks, and asks again with the answer; its reward is a column of the row."""
    client = async_openai_client(base_url)
    messages = [{"role": "user", "content": f"Q: {task['question']}\n"}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="any", messages=messages, stop=["."])
        heard.append((reply.choices[0].message.content, reply.usage.total_tokens))
        messages += [reply.choices[0].message, {"role": "user", "content": "Sure?\n"}]
    return task["worth"]


def plain_function(task, base_url):
    """No coroutine; forgets what was said, and streams."""
    client = openai_client(base_url)
    for text in ("first\n", "second\n"):
        parts = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": text}], stream=True
        )
        heard.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
    return 1.0


async def breaks(task, base_url):
    async with httpx.AsyncClient() as client:
        said = b'{"messages": [{"role": "user", "content": '
        bad = (b"no json", b'{"messages": []}', b'{"messages": [1]}', said + b'"\\ud800"}]}')
        for body in (*bad, said + b'"x"}], "stop": [""]}', said + b'"x"}], "stop": [5]}'):
            reply = await client.post(f"{base_url}/chat/completions", content=body)
            heard.append((reply.status_code, reply.json()["error"]["code"]))
        reply = await client.post(
            f"{base_url.replace('/sessions/', '/sessions/x')}/chat/completions",
            json={"messages": [{"role": "user", "content": "?"}]},
        )
        heard.append((reply.status_code, reply.json()["error"]["code"]))
    raise KeyError("the agent's own mistake")


async def is_listened_to(task, base_url):
    """Whoever counts does not find another episode, and a page of a browser reaches none."""
    heard.append(base_url.split("/")[4])
    body = {"messages": [{"role": "user", "content": "?"}]}
    async with httpx.AsyncClient() as client:
        for number in range(30):
            guessed = base_url.replace(heard[0], f"s{number}")
            assert (await client.post(f"{guessed}/chat/completions", json=body)).status_code == 404
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            reply = await client.post(f"{base_url}/chat/completions", json=body, headers=headers)
            heard.append((reply.status_code, reply.json()["error"]["type"]))
        await client.post(f"{base_url}/chat/completions", json=body)
    return 1.0


async def with_tools(task, base_url):
    """The OpenAI Agents SDK, a tool of its own."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def search(query: str) -> str:
        """Looks something up."""
        return f"{query} is a town"

    model = OpenAIChatCompletionsModel("any", async_openai_client(base_url))
    result = await Runner.run(Agent(name="x", model=model, tools=[search]), task["prompt"], max_turns=4)
    heard.append(result.final_output)


def play(script, function: str, rows: list[dict], tool_format: str = "search_r1", rewards: bool = True):
    heard.clear()
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, script)
    settings = {"agent": {"function": f"{HERE}:{function}", "tool_format": tool_format, "rewards": rewards}}
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


def test_an_episode_belongs_to_who_knows_its_id():
    _, _, (record,) = play(lambda *_: "x", "is_listened_to", [{}])
    assert record["env_reward"] == 1.0 and len(heard[0]) == 32
    assert heard[1:] == [(403, "invalid_request_error")] * 2


def test_mistakes_are_said_and_cost_the_episode_alone():
    _, _, (record,) = play(lambda *_: "x", "breaks", [{}])
    assert heard == [(400, "invalid_messages")] * 6 + [(404, "session_not_found")]
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
    engine, tokenizer, (record,) = play(
        script, "with_tools", [{"prompt": prompt}], tool_format, rewards=False
    )
    assert heard == ["<answer> a town </answer>"] and record["finish_reason"] == "done"
    assert len(record["turns"]) == 2 and "contexts" not in record and record["env_reward"] is None
    read = engine.calls[0][2]
    assert ("Looks something up." in read) == (tool_format == "hermes")
    assert read.endswith("What is Bora?\n")


async def keeps_history(task, base_url):
    """Rewrites the arguments of calls, then asks with other tools."""
    client = async_openai_client(base_url)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [{"role": "user", "content": "Go."}]
    reply = (await client.chat.completions.create(model="x", messages=messages, tools=tools)).choices[0]
    call = reply.message.tool_calls[0]
    same = json.dumps(json.loads(call.function.arguments), ensure_ascii=False, indent=1)
    function = {"name": call.function.name, "arguments": same}
    messages += [
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "seen"},
    ]
    for told in (tools, None):
        given = {} if told is None else {"tools": told}
        heard.append((await client.chat.completions.create(model="x", messages=messages, **given)).choices[0])
        messages += [heard[-1].message, {"role": "user", "content": "On."}]
    return 1.0


def test_calls_may_be_spelled_otherwise_and_other_tools_are_another_context():
    def script(prompt: str, turn: int) -> str:
        if turn or "seen" in prompt:
            return "w" * 200
        return f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'at': 'café'}})}</tool_call>"

    _, _, (record,) = play(script, "keeps_history", [{}], "hermes")
    assert len(record["turns"]) == 3 and record["env_reward"] == 1.0
    assert record["contexts"] == [record["turns"][1]["obs_start"]]
    assert [each.finish_reason for each in heard] == ["length", "length"]


async def many_turns(task, base_url):
    client = async_openai_client(base_url)
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(50):
        reply = await client.chat.completions.create(model="any", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "On.\n"}]


def returns_nothing(task, base_url):
    openai_client(base_url).chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])


def test_an_episode_that_a_limit_ends_has_no_reward_and_an_agent_must_return_one():
    _, _, (record,) = play(lambda *_: "z" * 90 + ".", "many_turns", [{"question": "long " * 90}])
    assert record["finish_reason"] == "length" and record["env_reward"] == 0.0
    _, _, (record,) = play(lambda *_: "z", "returns_nothing", [{}])
    assert record["finish_reason"] == "env_failed" and "expected a reward" in record["env_error"]


def waits_long(task, base_url):
    time.sleep(1.0)
    returns_nothing(task, base_url)
    return 1.0


def test_plain_functions_wait_side_by_side():
    began = time.monotonic()
    _, _, records = play(lambda *_: "x", "waits_long", [{} for _ in range(24)])
    assert [record["env_reward"] for record in records] == [1.0] * 24
    assert time.monotonic() - began < 20  # one after the other: 24


def test_settings_are_checked():
    for settings, said in (({}, "function=None"), ({"function": "json:loads", "tool_format": "x"}, "'x'")):
        env = Environments(None, {"agent": settings})
        with pytest.raises(ValueError, match=said):
            env["agent"].open({}, [], 0).result(10)
        env.close()
