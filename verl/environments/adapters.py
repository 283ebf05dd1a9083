"""Environments of other libraries in our loop.

env_class: gymnasium   a Gymnasium environment of text: `environment.env_config.gymnasium`, or the row's
                       column `gymnasium`: {"id": "my/Env-v0", "kwargs": {}, "actions": ["left", "right"]}
env_class: verifiers   an environment of the `verifiers` package with `load_environment` (its versions
                       from 0.1.14, below 0.4); `verifiers_rows(id, args)` gives the rows
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any
from unittest import mock

import httpx

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, Message

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_HOW_TO_CALL = 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class GymnasiumEnv(BaseTextEnv):
    """A Gymnasium environment: `reset` gives the first user message, each `step` the next one and a reward.

    The action is what stands in the last <action>..</action>, else the whole turn. The action space is Text,
    or Discrete with a name for each action in `actions`. The row's `seed` (else its extra_info.index, else 0)
    goes to `reset`, so that the trajectories of one prompt play the same game.
    """

    stop = ("</action>",)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        import gymnasium

        row = extras or {}
        config = {**(env_config or {}), **(row.get("gymnasium") or {})}
        if not config.get("id"):
            raise ValueError("A gymnasium environment needs its id: set environment.env_config.gymnasium.id.")
        index = (row.get("extra_info") or {}).get("index")
        self.seed = int(row["seed"] if row.get("seed") is not None else index or 0)
        self.env: Any = gymnasium.make(config["id"], **dict(config.get("kwargs") or {}))
        space: Any = self.env.action_space
        self.actions = [str(name) for name in config.get("actions") or ()]
        is_discrete = isinstance(space, gymnasium.spaces.Discrete)
        self.first_action = int(space.start) if is_discrete else 0
        number = int(space.n) if is_discrete else 0
        if len(self.actions) != number or not (is_discrete or isinstance(space, gymnasium.spaces.Text)):
            self.env.close()
            raise ValueError(
                f"Found {config['id']} with the action space {space} and {len(self.actions)} names in "
                "`actions`; expected a Text space without `actions`, or a Discrete one with a name for each."
            )

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        observation, _ = self.env.reset(seed=self.seed)
        return [*prompt, {"role": "user", "content": str(observation)}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        text: Any = (_ACTION.findall(action) or [action])[-1].strip()
        if self.actions and text not in self.actions:
            observation = f"There is no action {text[:100]!r}; choose one of {', '.join(self.actions)}."
            reward, done, metadata = 0.0, False, {"valid": False}
        else:
            taken = self.first_action + self.actions.index(text) if self.actions else text
            observation, reward, terminated, truncated, _ = self.env.step(taken)
            done, metadata = bool(terminated or truncated), {"valid": True, "truncated": bool(truncated)}
        observations = [] if done else [{"role": "user", "content": str(observation)}]
        return {"observations": observations, "reward": float(reward), "done": done, "metadata": metadata}

    def close(self) -> None:
        self.env.close()


def verifiers_rows(id: str, args: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The training rows of a `verifiers` environment. Their column `verifiers` is what `VerifiersEnv` reads:
    JSON text of the id, args and the environment's own row.

    Raises:
        ValueError: there is no such environment, or none that a single trajectory can be scored in.
    """
    args = dict(args or {})
    environment = load_verifiers_environment(id, args)
    return [
        {
            "prompt": [{"role": message["role"], "content": _plain(message)} for message in row["prompt"]],
            "data_source": id,
            "env_class": "verifiers",
            "verifiers": json.dumps({"id": id, "args": args, "row": row}, default=str),
            "extra_info": {"index": index},
        }
        for index, row in enumerate(environment.get_dataset().to_list())
    ]


_lock = threading.Lock()  # each of these is made once, by one of the threads that ask at the same time


def load_verifiers_environment(id: str, args: Mapping[str, Any]) -> Any:
    """The environment, once per process. ValueError: it can't be had."""
    with _lock:
        return _load(id, json.dumps(args, sort_keys=True))


@cache
def _load(id: str, args: str) -> Any:
    try:
        import verifiers

        load = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The environment {id!r} needs `load_environment` of the package verifiers: its versions from "
            f"0.1.14 and before 0.4 have it; 0.3.1 has been tried. ({error})"
        ) from error
    # It would take SIGINT and SIGTERM from the trainer, and can't in another thread than the main one.
    with mock.patch.object(signal, "signal"):
        environment = load(id, **json.loads(args))
    if environment.requires_group_rollouts:
        raise ValueError(f"{id!r} scores several trajectories of a prompt against each other; ours go alone.")
    return environment


class _PolicyTransport(httpx.AsyncBaseTransport):
    """Where the model's requests end: each is a turn of the episode that its model's name is of. The
    environments run in a thread with an event loop.
    """

    def __init__(self) -> None:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        self.episodes: dict[str, VerifiersEnv] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="verifiers", daemon=True).start()
        http = httpx.AsyncClient(transport=self, timeout=None)
        self.client = OpenAIChatCompletionsClient(
            AsyncOpenAI(base_url="http://policy", api_key="none", http_client=http, max_retries=0)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        episode = self.episodes[body["model"]]
        episode.turn = self.loop.create_future()
        episode.events.put(body)
        message: dict[str, Any] = {"role": "assistant", "content": await episode.turn}
        if body.get("tools"):
            message |= _with_tool_calls(message["content"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {
            "id": uuid.uuid4().hex,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0),
        }
        return httpx.Response(200, json=reply, request=request)


_transport = cache(_PolicyTransport)


class VerifiersEnv(BaseTextEnv):
    """An episode of a `verifiers` environment, in whose own `run_rollout` the policy is the model.

    Its requests are answered with our turns; the messages that it added since the last one are observations.
    Reward: its rubric's, at the end. A tool is called in the turn's text, with
    <tool_call>{"name": .., "arguments": {..}}</tool_call>; what it gives comes back in <tool_response>.
    """

    counts_turns = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        source = json.loads((extras or {})["verifiers"])
        self.environment = load_verifiers_environment(source["id"], source["args"])
        self.row, self.name = source["row"], uuid.uuid4().hex
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.turn: asyncio.Future[str] | None = None
        self.messages: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.rollout: Future[Any] | None = None

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        with _lock:
            transport = _transport()
        transport.episodes[self.name] = self
        coroutine = self.environment.run_rollout(self.row, transport.client, self.name, {})
        self.rollout = asyncio.run_coroutine_threadsafe(coroutine, transport.loop)
        self.rollout.add_done_callback(self.events.put)
        request = self.events.get()
        if isinstance(request, Future):
            raise ValueError(f"The rollout ended before its first turn: {request.result().get('error')}")
        self.messages = request["messages"]
        shown = [{"role": message["role"], "content": _plain(message)} for message in self.messages]
        if request.get("tools"):
            tools = "\n".join(json.dumps(tool) for tool in request["tools"])
            text = f"These tools can be called:\n<tools>\n{tools}\n</tools>\n{_HOW_TO_CALL}"
            if shown[0]["role"] == "system":
                text = f"{shown.pop(0)['content']}\n\n{text}"
            shown.insert(0, {"role": "system", "content": text})
        return shown, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        assert self.turn is not None
        self.turn.get_loop().call_soon_threadsafe(self.turn.set_result, action)
        event = self.events.get()
        if isinstance(event, Future):
            output = event.result()
            if output.get("error"):
                raise RuntimeError(f"The environment of verifiers failed: {output['error']}")
            self.metrics = dict(output.get("metrics") or {})
            return {"observations": [], "reward": float(output["reward"]), "done": True, "metadata": {}}
        old, new = self.messages, event["messages"]
        if new[: len(old)] != old or new[len(old)]["role"] != "assistant":
            raise ValueError("The environment rewrites what the policy has read; ours can only be added to.")
        self.messages = new
        observations = [{"role": "user", "content": _plain(message)} for message in new[len(old) + 1 :]]
        return {"observations": observations, "reward": 0.0, "done": False, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics

    def close(self) -> None:
        if self.rollout is not None:
            self.rollout.cancel()
            _transport().episodes.pop(self.name, None)


def _plain(message: Mapping[str, Any]) -> str:
    """A message's text; of a tool's in the tags that models know."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return f"<tool_response>\n{content}\n</tool_response>" if message["role"] == "tool" else content


def _with_tool_calls(text: str) -> dict[str, Any]:
    """The turn as OpenAI writes it: `content` without the calls, and `tool_calls`."""
    calls: list[dict[str, Any]] = []
    for found in _TOOL_CALL.findall(text):
        try:
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, LookupError, TypeError):
            function = {"name": "invalid", "arguments": found}  # the environment says what is wrong with it
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
    return {"content": _TOOL_CALL.sub("", text), "tool_calls": calls} if calls else {}
