"""Where environments run: in the loop's own thread, in threads, or in processes that can be killed.

    runner = EnvironmentRunner("maze", env_config={...})
    episode = runner.open(extras, prompt, max_turns)              or a Future of it
    outputs = runner.step_many([episode, ...], [text, ...])       each an output, a Future of one, or an error
    runner.close(episode)                                         once, whatever happened

An exception of an environment is its own episode's end and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from verl.environments.registry import load_class, make

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | Exception


@dataclass(eq=False)
class Episode:
    """An environment in use.

    messages: what its `init` wants to be shown; None: the row's prompt. seconds_init, seconds_step: in these.
    metrics: its `get_metrics`, once it is closed.
    """

    env: Any
    messages: list[Message] | None = None
    seconds_init: float = 0.0
    seconds_step: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(getattr(self.env, "stop", ()))


class EnvironmentRunner:
    """The episodes of one environment in this process."""

    def __init__(self, env_class: str, env_config: Mapping[str, Any] | None = None) -> None:
        """ValueError: there is no environment of this name."""
        cls = load_class(env_class)
        self.env_class, self.env_config = env_class, dict(env_config or {})
        self.observation_end: str = getattr(cls, "observation_end", "")
        self.counts_turns: bool = getattr(cls, "counts_turns", False)
        self.stateless: bool = getattr(cls, "stateless", False)
        self._steps_many = getattr(cls, "step_many", None)
        own = {name: getattr(cls, name, None) for name in ("init", "close", "get_metrics")}
        self._has_init, self._has_close, self._has_metrics = (
            function is not None and function is not getattr(BaseTextEnv, name)
            for name, function in own.items()
        )

    def open(self, extras: Mapping[str, Any], prompt: list[Message], num_turns: int = 0) -> Episode:
        """Makes an environment for an episode, of which `num_turns` have been taken before."""
        started = time.perf_counter()
        episode = Episode(make(self.env_class, env_config=self.env_config, extras=dict(extras)))
        if num_turns:
            episode.env.turns = num_turns
        if self._has_init:
            episode.messages = list(episode.env.init(prompt)[0])
        episode.seconds_init = time.perf_counter() - started
        return episode

    def step_many(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[StepResult]:
        """Takes an action in each episode."""
        if self._steps_many is not None:
            results = self._steps_many([episode.env for episode in episodes], actions)
            if results is not None:
                return results
        return [self._step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def _step(self, episode: Episode, action: str) -> StepResult:
        started = time.perf_counter()
        try:
            return episode.env.step(action)
        except Exception as error:  # it is a user's environment: anything may come
            return error
        finally:
            episode.seconds_step += time.perf_counter() - started

    def close(self, episode: Episode) -> None:
        """Ends an episode. Called once for each."""
        try:
            if self._has_metrics:
                episode.metrics = dict(episode.env.get_metrics())
        finally:
            if self._has_close:
                episode.env.close()
