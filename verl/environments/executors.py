"""Where environments run: in the loop's own thread, in threads, in processes that can be killed, or, if their
`step` is a coroutine function, in an event loop.

    stage = Environments(block, env_config)                      of one process
    runner = stage["maze"]
    episode = runner.open(extras, prompt, max_turns)             or a Future of it
    results = runner.step_many([episode, ...], [text, ...])      each an output, a Future of one, or an error
    runner.close(episode)                                        once, whatever happened

`environment.executor`: auto follows the class's `runs`. At most `max_workers` threads wait for others (so
many cost little, and fewer would hold up a batch), and coroutines in any number; of processes, which compute,
MOST_COMPUTING of all environments together do at a time. An exception of an environment, or a call that takes
longer than `environment.step_timeout`, is its own episode's end and nobody else's.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

from verl.config.environments import EnvironmentConfig
from verl.environments.base import (
    ActionUnderWay,
    BaseTextEnv,
    BaseTextEnvStepOutput,
    EpisodeFailed,
    Message,
    check_stop,
    make_environment,
)
from verl.environments.calls import Call, Calls, at_once, attempt, here, settled
from verl.environments.registry import load_class
from verl.verifiers.workers import CheckFailed, KillableProcess, KillableWorkers, ProcessEnded

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | ActionUnderWay | Exception
MOST_COMPUTING = 32
CLOSE_SECONDS = 10.0  # for all episodes of a run that ends in haste


@dataclass(eq=False)
class Episode:
    """An environment in use.

    env: None before it is made and after its end. stop: strings that end a turn. messages: what its `init`
    wants to be shown; None: the row's prompt. seconds_init, seconds_step: in these, without waiting for a
    thread. metrics: its `get_metrics`, once it is closed. under_way: the call that it is at. is_over: what is
    made of it from now on is closed. turn: of one coroutine at a time.
    """

    env: Any = None
    stop: tuple[str, ...] = ()
    messages: list[Message] | None = None
    seconds_init: float = 0.0
    seconds_step: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    under_way: Future[Any] | None = None
    is_over: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


async def finish(env: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """Closes an environment; `metrics` gets what its `get_metrics` says."""
    try:
        if hasattr(env, "get_metrics"):
            metrics.update(await settled(env.get_metrics()) or {})
    finally:
        if hasattr(env, "close"):
            await settled(env.close())
    return metrics


_env: Any = None  # of a process
_runner = asyncio.Runner()  # of its coroutines


def act(method: str, *arguments: Any) -> Any:
    """What a process does: it makes its environment, calls a method of it, and closes it."""
    global _env
    if method == "import":
        with suppress(Exception):  # the process that makes the environment says what is wrong with its module
            return importlib.import_module(*arguments)
    if method == "make":
        _env = None  # where this fails, the one before is not closed again
        _env = make_environment(*arguments)
        return None
    if method == "finish":
        env = _env
        _env = None
        result = finish(env, {})
    else:
        result = getattr(_env, method)(*arguments)
    return _runner.run(settled(result)) if inspect.isawaitable(result) else result


class ProcessEnvironment:
    """Stands for an environment that lives in a process, from its first call on."""

    def __init__(self, workers: KillableWorkers, cls: Callable[..., Any], /, **kwargs: Any) -> None:
        self.workers = workers
        self.arguments = (cls, kwargs)
        self.is_busy = self.is_over = False
        stop = getattr(cls, "stop", ())
        self.stop = stop if isinstance(stop, tuple | list) else ()
        self.process: KillableProcess | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        self.is_busy = True
        try:
            if self.process is None:
                self.process = self.workers.take()
                if self.is_over:  # it has started too late
                    self.process.kill()
                self.process.call("make", *self.arguments)
            return self.process.call(method, *arguments)
        except (CheckFailed, ProcessEnded, OSError) as error:
            said = f"{error}{getattr(error, 'place', '')}"
            raise EpisodeFailed(said or "its process was killed") from error
        finally:
            self.is_busy = False

    init = partialmethod(call, "init")
    step = partialmethod(call, "step")

    def cut(self) -> None:
        """Kills its process if it is at something, or as soon as it has started."""
        self.is_over = True
        if self.process is not None and self.is_busy:
            self.process.kill()

    def get_metrics(self) -> dict[str, Any]:
        """The last call, which closes the environment, too; its process is left to another episode."""
        metrics: dict[str, Any] = {}
        if not self.is_busy and self.process is not None and self.process.is_alive:
            try:
                metrics = self.call("finish")
            finally:
                self.workers.give_back(self.process)
        return metrics


class EnvironmentRunner:
    """The episodes of one environment in this process."""

    def __init__(
        self, env_class: str, env_config: Mapping[str, Any], block: EnvironmentConfig, calls: dict[str, Calls]
    ) -> None:
        """calls: by where they run. ValueError: there is no environment of this name, or it can't run so."""
        cls, always = load_class(env_class)
        self.env_class = env_class
        self.timeout = block.step_timeout
        self.calls = calls
        self._cls = cls
        self._kwargs = {**always, "env_config": dict(env_config)}
        self.how = getattr(cls, "runs", "thread") if block.executor == "auto" else block.executor
        if inspect.iscoroutinefunction(getattr(cls, "step", None)) and block.executor != "process":
            if block.executor == "inline":
                raise ValueError(
                    f"Found environment.executor=inline with {env_class}, whose step is a coroutine function "
                    "and runs in an event loop; expected auto."
                )
            self.how = "async"
        self.observation_end: str = getattr(cls, "observation_end", "")
        self.counts_turns: bool = getattr(cls, "counts_turns", False)
        self.reads_usage: bool = getattr(cls, "reads_usage", False)
        self.stateless: bool = getattr(cls, "stateless", False)
        self._steps_many = getattr(cls, "step_many", None) if self.how != "process" else None
        self._starts = getattr(cls, "init", None) not in (None, BaseTextEnv.init)
        self._just_ends = self.how != "process" and all(
            getattr(cls, name, None) is getattr(BaseTextEnv, name) for name in ("close", "get_metrics")
        )
        self.workers = None
        if self.how == "process":
            self.workers = KillableWorkers(f"{__name__}:act", 0.0, ["import", cls.__module__])
            self._cls = partial(ProcessEnvironment, self.workers, cls)
        self._has_complained = False
        self._lock = threading.Lock()
        self.ends: set[Future[None]] = set()  # of episodes that are being closed

    def open(
        self,
        row: Mapping[str, Any],
        prompt: Any,
        max_turns: int,
        num_turns: int = 0,
        state: bytes | None = None,
    ) -> Episode | Future[Episode]:
        """Makes an environment for an episode. row: its columns. prompt: its messages. max_turns: most
        actions. num_turns: that a stateless one has behind it. state: of `keep`, of one that goes on.
        """
        episode = Episode()

        async def begin() -> Episode:
            started = time.perf_counter()
            if state is None:
                kwargs = {**self._kwargs, "extras": {**row, "max_turns": max_turns}}
                env = make_environment(self._cls, kwargs)
                if num_turns:
                    env.turns = num_turns
            else:
                env = pickle.loads(state)
            check_stop(getattr(env, "stop", ()))
            episode.env = env
            if episode.is_over:  # it took too long
                await self._end(episode)
            elif self._starts and state is None:
                shown = await settled(env.init(prompt))
                is_pair = isinstance(shown, tuple | list) and len(shown) == 2
                if not is_pair or not isinstance(shown[0], tuple | list):
                    raise EpisodeFailed(f"init returned {shown!r:.200}; expected (messages, information)")
                episode.messages = list(shown[0])
            episode.stop = tuple(getattr(env, "stop", ()))
            episode.seconds_init = time.perf_counter() - started
            return episode

        def check(opened: Future[Episode]) -> None:
            if opened.cancelled() or opened.exception() is not None:
                self.close(episode)

        if self.workers is not None and not self._starts:
            return at_once(begin())
        if self.how == "inline":
            try:
                return here(begin)
            except Exception:
                self.close(episode)
                raise
        opened = self._submit(episode, begin)
        opened.add_done_callback(check)
        return opened

    def step_many(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[StepResult]:
        """Takes an action in each episode."""
        if self._steps_many is not None:
            try:
                results = self._steps_many([episode.env for episode in episodes], actions)
            except Exception as error:  # it is a user's environment: anything may come
                results = [error] * len(episodes)
            if results is not None:
                for episode, result in zip(episodes, results, strict=True):
                    future = result.future if isinstance(result, ActionUnderWay) else result
                    episode.under_way = future if isinstance(future, Future) else None
                return results
        return [self._step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def _step(self, episode: Episode, action: str) -> StepResult:
        async def take() -> BaseTextEnvStepOutput:
            started = time.perf_counter()
            try:
                return await settled(episode.env.step(action))
            finally:
                episode.stop = tuple(getattr(episode.env, "stop", ()))  # it may change from turn to turn
                episode.seconds_step += time.perf_counter() - started

        try:
            return here(take) if self.how == "inline" else self._submit(episode, take)
        except Exception as error:  # it is a user's environment: anything may come
            return error

    def keep(self, episode: Episode) -> bytes | None:
        """The environment for a later `open`; None: it can't be kept."""
        with suppress(Exception):  # pickling raises all kinds
            if episode.under_way is None or episode.under_way.done():
                return pickle.dumps(episode.env)
        return None

    def close(self, episode: Episode) -> None:
        """Ends an episode, after the call that it is at."""
        if self._just_ends:  # nothing is to be called: most episodes, which searches are
            episode.env = None
            episode.is_over = True
            return
        ended: Future[None] = Future()
        self.ends.add(ended)
        ended.add_done_callback(self.ends.discard)

        def begin(_: object = None) -> None:
            if isinstance(episode.env, ProcessEnvironment):
                episode.env.cut()  # at once: the end may wait for a thread
            self._submit(episode, lambda: self._end(episode)).add_done_callback(end)

        def end(job: Future[None]) -> None:
            if (error := job.exception()) is not None and not self._has_complained:
                self._has_complained = True
                print(f"note: environment {self.env_class}: the end of an episode failed: {error!r}")
            ended.set_result(None)

        if episode.under_way is None or self.how == "inline":
            begin()
        else:
            episode.under_way.add_done_callback(begin)

    def _submit(self, episode: Episode, call: Call) -> Future[Any]:
        if self.how == "inline":
            future: Future[Any] = Future()
            attempt(future, call)
            return future
        episode.under_way = self.calls[self.how].submit(call, self.timeout, episode.turn)
        return episode.under_way

    async def _end(self, episode: Episode) -> None:
        """Closes an environment that was made, once."""
        with self._lock:
            env = episode.env
            episode.env = None
            episode.is_over = True
        if env is not None:
            await finish(env, episode.metrics)


class Environments:
    """The environments of this process, made as they are asked for."""

    def __init__(
        self, block: EnvironmentConfig | None = None, env_config: Mapping[str, Any] | None = None
    ) -> None:
        """block: the run's. env_config: environment -> more of what its instances are made with."""
        self.block = block or EnvironmentConfig()
        self.env_config = env_config or {}
        threads = self.block.max_workers
        most = {"thread": threads, "process": min(threads, MOST_COMPUTING), "async": None}
        self.calls = {how: Calls(number) for how, number in most.items()}
        self._runners: dict[str, EnvironmentRunner] = {}

    def __getitem__(self, env_class: str) -> EnvironmentRunner:
        if env_class not in self._runners:
            config = {**self.block.env_config.get(env_class, {}), **self.env_config.get(env_class, {})}
            self._runners[env_class] = EnvironmentRunner(env_class, config, self.block, self.calls)
        return self._runners[env_class]

    def give_up(self) -> None:
        """Ends every call that is under way; to be said before episodes are closed in haste."""
        for calls in self.calls.values():
            calls.give_up()

    def wait_for_ends(self, seconds: float | None = None) -> None:
        """Until the episodes are closed that are over."""
        wait([end for runner in self._runners.values() for end in list(runner.ends)], seconds)

    def close(self) -> None:
        """Ends threads and processes."""
        self.give_up()
        self.wait_for_ends(CLOSE_SECONDS)
        for calls in self.calls.values():
            calls.close()
        for runner in self._runners.values():
            if runner.workers is not None:
                runner.workers.close()
