"""Environments of other libraries in our loop.

env_class: gymnasium   A Gymnasium environment of text. Its settings are in `environment.env_config.gymnasium`
                       or in the row's column `gymnasium`:
                       {"id": "my/Env-v0", "kwargs": {}, "actions": ["left", "right"]}
env_class: verifiers   An environment of the `verifiers` package with `load_environment` (its versions
                       from 0.1.14, below 0.4). `verifiers_rows(id, args)` returns the rows.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from unittest import mock

from verl.environments.agent_function import ProgramEnv
from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed, Message
from verl.environments.messages import as_plain_text

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def _as_text(observation: Any) -> str:
    """Return an observation of a Gymnasium environment as text.

    Raises EpisodeFailed for None and bytes, which are no observations of text.
    """
    if observation is None or isinstance(observation, bytes):
        raise EpisodeFailed(f"the environment's observation is {observation!r:.200}; expected text")
    return str(observation)


class GymnasiumEnv(BaseTextEnv):
    """A Gymnasium environment.

    `reset` returns the first user message, and each `step` returns the next one and a reward. The action is
    the text in the last <action>..</action>, or the whole turn if there is none. The action space is Text, or
    Discrete with a name for each action in `actions`. `reset` gets the row's `seed`, so that the trajectories
    of one prompt play the same game. If the row has no `seed`, its extra_info.index is used, or else 0.
    """

    stop = ("</action>",)
    needs = ("gymnasium",)

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
        names = [str(name) for name in config.get("actions") or ()]
        is_discrete = isinstance(space, gymnasium.spaces.Discrete)
        values = range(int(space.start), int(space.start + space.n)) if is_discrete else ()
        self.actions = dict(zip(names, values, strict=False))
        if len(names) != len(values) or not (is_discrete or isinstance(space, gymnasium.spaces.Text)):
            self.env.close()
            raise ValueError(
                f"Found {config['id']} with the action space {space} and {len(names)} names in "
                "`actions`; expected a Text space without `actions`, or a Discrete one with a name for each."
            )

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        observation, _ = self.env.reset(seed=self.seed)
        return [*prompt, {"role": "user", "content": _as_text(observation)}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        text: Any = (_ACTION.findall(action) or [action])[-1].strip()
        if self.actions and text not in self.actions:
            observation = f"There is no action {text[:100]!r}; choose one of {', '.join(self.actions)}."
            reward = 0.0
            done = False
            metadata = {"valid": False}
        else:
            observation, reward, terminated, truncated, _ = self.env.step(self.actions.get(text, text))
            done = bool(terminated or truncated)
            metadata = {"valid": True, "truncated": bool(truncated)}
        observations = [] if done else [{"role": "user", "content": _as_text(observation)}]
        return {"observations": observations, "reward": float(reward), "done": done, "metadata": metadata}

    def close(self) -> None:
        self.env.close()


def verifiers_rows(id: str, args: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the training rows of a `verifiers` environment.

    `VerifiersEnv` reads their column `verifiers`, which is JSON text of the id, the args and the
    environment's own row.

    Raises:
        ValueError: If there is no such environment, or if it can't score a single trajectory.
    """
    args = dict(args or {})
    environment = load_verifiers_environment(id, args)
    return [
        {
            "prompt": [
                {"role": message["role"], "content": as_plain_text(message)} for message in row["prompt"]
            ],
            "data_source": id,
            "env_class": "verifiers",
            "verifiers": json.dumps({"id": id, "args": args, "row": row}, default=str),
            "extra_info": {"index": index},
        }
        for index, row in enumerate(environment.get_dataset().to_list())
    ]


_lock = threading.Lock()
_loaded: dict[str, Any] = {}


def load_verifiers_environment(id: str, args: Mapping[str, Any]) -> Any:
    """Return the environment, which is made once for all threads of this process.

    Raises ValueError if it can't be loaded, or if it scores several trajectories against each other.
    """
    key = json.dumps([id, args], sort_keys=True)
    with _lock:
        if key in _loaded:
            return _loaded[key]
        try:
            import verifiers

            load = verifiers.load_environment
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"The environment {id!r} needs `load_environment` of the package verifiers: its versions "
                f"from 0.1.14 and before 0.4 have it; 0.3.1 has been tried. ({error})"
            ) from error
        # The environment would install handlers for SIGINT and SIGTERM in place of the trainer's. In any
        # thread but the main one it can't, and would fail.
        with mock.patch.object(signal, "signal"):
            environment = load(id, **args)
        if environment.requires_group_rollouts:
            raise ValueError(
                f"{id!r} scores several trajectories of a prompt against each other; ours go alone."
            )
        _loaded[key] = environment
        return environment


class VerifiersEnv(ProgramEnv):
    """An episode of a `verifiers` environment, in whose own `run_rollout` the policy is the model.

    The environment's requests are answered with our turns. The messages that it has added since the last
    request are observations. The reward is that of its rubric, at the end. The policy calls a tool in the
    text of its turn, with <tool_call>{"name": .., "arguments": {..}}</tool_call>, and the result comes back
    in <tool_response>.
    """

    needs = ("verifiers",)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.source = json.loads((extras or {})["verifiers"])
        self.metrics: dict[str, Any] = {}

    async def play(self, prompt: list[Message]) -> float:
        environment, model = await asyncio.to_thread(self._prepare)
        output = await environment.run_rollout(self.source["row"], model, "policy", {})
        if output.get("error"):
            raise RuntimeError(f"The environment of verifiers failed: {output['error']}")
        self.metrics = dict(output.get("metrics") or {})
        return float(output["reward"])

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics

    def _prepare(self) -> tuple[Any, Any]:
        """Return the environment and its model.

        The first call takes seconds, for imports and data.
        """
        environment = load_verifiers_environment(self.source["id"], self.source["args"])
        from openai.types.chat import ChatCompletion
        from verifiers.clients import OpenAIChatCompletionsClient

        async def answer(messages: Any, model: str, sampling: Any, tools: Any = None, **_: Any) -> Any:
            """Answer a request of the rollout to its model with the policy's next turn."""
            turn: Future[Any] = Future()
            self.events.put_nowait(({"messages": messages, "tools": tools}, turn))
            message, _usage = await asyncio.wrap_future(turn)
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choices = [{"index": 0, "message": message, "finish_reason": reason}]
            reply = {"id": self.source["id"], "object": "chat.completion", "created": 0, "model": model}
            return ChatCompletion.model_validate({**reply, "choices": choices})

        policy: Any = OpenAIChatCompletionsClient(None)
        policy.get_native_response = answer
        return environment, policy
