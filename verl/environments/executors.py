"""The places where environments run.

Environments run in the loop's own thread, in other threads, or in processes that can be killed. If their
`step` is a coroutine function, they run in an event loop.

    stage = Environments(block, env_config)                      of one process
    runner = stage["maze"]
    episode = runner.open(extras, prompt, max_turns)             or a Future of it
    results = runner.step_many([episode, ...], [text, ...])      each an output, a Future of one, or an error
    runner.close(episode)                                        once, whatever happened

With `environment.executor=auto` the class's `runs` decides. Threads and coroutines wait for others. At most
`max_workers` threads do so at a time: that many cost little, and fewer would hold up a batch. The number of
coroutines has no limit. Processes compute. At most MOST_COMPUTING of them, over all environments, are at work
at a time. An environment that raises, or whose call takes longer than `environment.step_timeout`, ends its
own episode and no other.
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
from verl.environments.calls import (
    Call,
    CallPool,
    attempt,
    await_if_needed,
    run_in_this_thread,
    run_without_waiting,
)
from verl.environments.environment import (
    ActionUnderWay,
    BaseTextEnv,
    BaseTextEnvStepOutput,
    EpisodeFailed,
    Message,
    check_stop,
    make_environment,
)
from verl.environments.registry import load_class
from verl.verifiers.workers import CheckFailed, KillableProcess, KillableWorkers, ProcessEnded

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | ActionUnderWay | Exception
MOST_COMPUTING = 32
CLOSE_SECONDS = 10.0  # the time for closing all episodes of a run that ends in haste


@dataclass(eq=False)
class EnvironmentHandle:
    """A handle of an environment in use.

    Attributes:
        env: The environment. None before it is made and after its end.
        stop: Strings that end a turn.
        messages: The messages that its `init` shows the policy. None for the row's prompt.
        seconds_init: The seconds in `__init__` and `init`, without the wait for a thread.
        seconds_step: The seconds in all calls of `step`, without the wait for a thread.
        metrics: The result of `get_metrics`, once the environment is closed.
        under_way: The future of the last call, which may still be under way. None if there is none.
        is_over: Whether the episode has ended. An environment that is made after that is closed at once.
        turn: A lock that lets one coroutine run at a time.
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


async def close_and_collect_metrics(env: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """Close an environment, and return `metrics` with the result of its `get_metrics` added."""
    try:
        if hasattr(env, "get_metrics"):
            metrics.update(await await_if_needed(env.get_metrics()) or {})
    finally:
        if hasattr(env, "close"):
            await await_if_needed(env.close())
    return metrics


_env: Any = None  # the environment of this process, if the process runs `handle_request`
_runner = asyncio.Runner()  # runs the coroutines of that environment


def handle_request(method: str, *arguments: Any) -> Any:
    """Make, call or close the environment of a process.

    The process runs this function for each call.

    Args:
        method: "import" for a module, "make" for the environment, "finish" to close it, or the name of one of
            its methods.
        arguments: The arguments of that call.
    """
    global _env
    if method == "import":
        # The process that makes the environment reports what is wrong with its module.
        with suppress(Exception):
            return importlib.import_module(*arguments)
    if method == "make":
        _env = None  # if the next line fails, the environment before is not closed again
        _env = make_environment(*arguments)
        return None
    if method == "finish":
        env = _env
        _env = None
        result = close_and_collect_metrics(env, {})
    else:
        result = getattr(_env, method)(*arguments)
    return _runner.run(await_if_needed(result)) if inspect.isawaitable(result) else result


class ProcessEnvironment:
    """A stand-in for an environment that lives in a process of its own from its first call on."""

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
                if self.is_over:  # the process has started too late
                    self.process.kill()
                self.process.call("make", *self.arguments)
            return self.process.call(method, *arguments)
        except (CheckFailed, ProcessEnded, OSError) as error:
            message = f"{error}{getattr(error, 'place', '')}"
            raise EpisodeFailed(message or "its process was killed") from error
        finally:
            self.is_busy = False

    init = partialmethod(call, "init")
    step = partialmethod(call, "step")

    def kill_if_busy(self) -> None:
        """Kill the process if it is in a call, or else as soon as it has started."""
        self.is_over = True
        if self.process is not None and self.is_busy:
            self.process.kill()

    def get_metrics(self) -> dict[str, Any]:
        """Close the environment and return its metrics.

        This is the last call. Another episode may use the process afterwards.
        """
        metrics: dict[str, Any] = {}
        if not self.is_busy and self.process is not None and self.process.is_alive:
            try:
                metrics = self.call("finish")
            finally:
                self.workers.give_back(self.process)
        return metrics


class EnvironmentRunner:
    """The runner of one environment's episodes in this process."""

    def __init__(
        self,
        env_class: str,
        env_config: Mapping[str, Any],
        block: EnvironmentConfig,
        calls: dict[str, CallPool],
    ) -> None:
        """Load the class of an environment and choose where its episodes run.

        Args:
            env_class: The name of the environment, or package.module:Class.
            env_config: The settings that the environment is made with.
            block: The run's block `environment`.
            calls: The calls of this process, by where they run: "thread", "process" or "async".

        Raises:
            ValueError: If there is no environment of this name, or if it can't run where the block says.
        """
        cls, default_kwargs = load_class(env_class)
        self.env_class = env_class
        self.timeout = block.step_timeout
        self.calls = calls
        self._cls = cls
        self._kwargs = {**default_kwargs, "env_config": dict(env_config)}
        self.executor_kind = getattr(cls, "runs", "thread") if block.executor == "auto" else block.executor
        if inspect.iscoroutinefunction(getattr(cls, "step", None)) and block.executor != "process":
            if block.executor == "inline":
                raise ValueError(
                    f"Found environment.executor=inline with {env_class}, whose step is a coroutine function "
                    "and runs in an event loop; expected auto."
                )
            self.executor_kind = "async"
        self.observation_end: str = getattr(cls, "observation_end", "")
        self.counts_turns: bool = getattr(cls, "counts_turns", False)
        self.reads_usage: bool = getattr(cls, "reads_usage", False)
        self.stateless: bool = getattr(cls, "stateless", False)
        self._steps_many = getattr(cls, "step_many", None) if self.executor_kind != "process" else None
        self._has_init = getattr(cls, "init", None) not in (None, BaseTextEnv.init)
        self._needs_no_close = self.executor_kind != "process" and all(
            getattr(cls, name, None) is getattr(BaseTextEnv, name) for name in ("close", "get_metrics")
        )
        self.workers = None
        if self.executor_kind == "process":
            self.workers = KillableWorkers(f"{__name__}:handle_request", 0.0, ["import", cls.__module__])
            self._cls = partial(ProcessEnvironment, self.workers, cls)
        self._has_complained = False
        self._lock = threading.Lock()
        self.closing: set[Future[None]] = set()  # one future for each episode that is being closed

    def open(
        self,
        row: Mapping[str, Any],
        prompt: Any,
        max_turns: int,
        num_turns: int = 0,
        state: bytes | None = None,
    ) -> EnvironmentHandle | Future[EnvironmentHandle]:
        """Make an environment for an episode, and return the episode or a future of it.

        Args:
            row: The columns of the row.
            prompt: The messages of the prompt.
            max_turns: The most actions of the episode.
            num_turns: The number of turns behind a stateless environment that goes on.
            state: The result of `pickle_env` for an environment that goes on, or None for a new one.
        """
        episode = EnvironmentHandle()

        async def begin() -> EnvironmentHandle:
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
            if episode.is_over:  # making the environment took too long
                await self._end(episode)
            elif self._has_init and state is None:
                shown = await await_if_needed(env.init(prompt))
                is_pair = isinstance(shown, tuple | list) and len(shown) == 2
                if not is_pair or not isinstance(shown[0], tuple | list):
                    raise EpisodeFailed(f"init returned {shown!r:.200}; expected (messages, information)")
                episode.messages = list(shown[0])
            episode.stop = tuple(getattr(env, "stop", ()))
            episode.seconds_init = time.perf_counter() - started
            return episode

        def check(opened: Future[EnvironmentHandle]) -> None:
            if opened.cancelled() or opened.exception() is not None:
                self.close(episode)

        if self.workers is not None and not self._has_init:
            return run_without_waiting(begin())
        if self.executor_kind == "inline":
            try:
                return run_in_this_thread(begin)
            except Exception:
                self.close(episode)
                raise
        opened = self._submit(episode, begin)
        opened.add_done_callback(check)
        return opened

    def step_many(self, episodes: Sequence[EnvironmentHandle], actions: Sequence[str]) -> list[StepResult]:
        """Take an action in each episode, and return an output, a future of one, or an error for each."""
        if self._steps_many is not None:
            try:
                results = self._steps_many([episode.env for episode in episodes], actions)
            except Exception as error:  # a user's environment may raise anything
                results = [error] * len(episodes)
            if results is not None:
                for episode, result in zip(episodes, results, strict=True):
                    future = result.future if isinstance(result, ActionUnderWay) else result
                    episode.under_way = future if isinstance(future, Future) else None
                return results
        return [self._step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def _step(self, episode: EnvironmentHandle, action: str) -> StepResult:
        async def take() -> BaseTextEnvStepOutput:
            started = time.perf_counter()
            try:
                return await await_if_needed(episode.env.step(action))
            finally:
                episode.stop = tuple(getattr(episode.env, "stop", ()))  # `stop` may change from turn to turn
                episode.seconds_step += time.perf_counter() - started

        try:
            return run_in_this_thread(take) if self.executor_kind == "inline" else self._submit(episode, take)
        except Exception as error:  # a user's environment may raise anything
            return error

    def pickle_env(self, episode: EnvironmentHandle) -> bytes | None:
        """Return the pickled environment for a later `open`, or None if it can't be kept.

        An environment can't be kept while a call of it is under way, or if it can't be pickled.
        """
        with suppress(Exception):  # pickling raises exceptions of all kinds
            if episode.under_way is None or episode.under_way.done():
                return pickle.dumps(episode.env)
        return None

    def close(self, episode: EnvironmentHandle) -> None:
        """End an episode, after the call that is under way."""
        if self._needs_no_close:  # This holds for most episodes, as they are searches.
            episode.env = None
            episode.is_over = True
            return
        ended: Future[None] = Future()
        self.closing.add(ended)
        ended.add_done_callback(self.closing.discard)

        def begin(_: object = None) -> None:
            if isinstance(episode.env, ProcessEnvironment):
                episode.env.kill_if_busy()  # at once, because the end may wait for a thread
            self._submit(episode, lambda: self._end(episode)).add_done_callback(end)

        def end(job: Future[None]) -> None:
            if (error := job.exception()) is not None and not self._has_complained:
                self._has_complained = True
                print(f"note: environment {self.env_class}: the end of an episode failed: {error!r}")
            ended.set_result(None)

        if episode.under_way is None or self.executor_kind == "inline":
            begin()
        else:
            episode.under_way.add_done_callback(begin)

    def _submit(self, episode: EnvironmentHandle, call: Call) -> Future[Any]:
        if self.executor_kind == "inline":
            future: Future[Any] = Future()
            attempt(future, call)
            return future
        episode.under_way = self.calls[self.executor_kind].submit(call, self.timeout, episode.turn)
        return episode.under_way

    async def _end(self, episode: EnvironmentHandle) -> None:
        """Close an environment if it was made, and only once."""
        with self._lock:
            env = episode.env
            episode.env = None
            episode.is_over = True
        if env is not None:
            await close_and_collect_metrics(env, episode.metrics)


class Environments:
    """The runners of this process, one for each environment, made when they are first asked for."""

    def __init__(
        self, block: EnvironmentConfig | None = None, env_config: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare the calls of this process.

        Args:
            block: The run's block `environment`. None for its defaults.
            env_config: More settings that the instances of each environment are made with, by its name.
        """
        self.block = block or EnvironmentConfig()
        self.env_config = env_config or {}
        threads = self.block.max_workers
        limits = {"thread": threads, "process": min(threads, MOST_COMPUTING), "async": None}
        self.calls = {executor_kind: CallPool(limit) for executor_kind, limit in limits.items()}
        self._runners: dict[str, EnvironmentRunner] = {}

    def __getitem__(self, env_class: str) -> EnvironmentRunner:
        if env_class not in self._runners:
            config = {**self.block.env_config.get(env_class, {}), **self.env_config.get(env_class, {})}
            self._runners[env_class] = EnvironmentRunner(env_class, config, self.block, self.calls)
        return self._runners[env_class]

    def fail_pending_calls(self) -> None:
        """Fail every call that is under way.

        Use this before you close episodes in haste.
        """
        for calls in self.calls.values():
            calls.fail_pending()

    def wait_for_ends(self, seconds: float | None = None) -> None:
        """Wait until all episodes that are over are closed, for at most `seconds` if it is given."""
        wait([end for runner in self._runners.values() for end in list(runner.closing)], seconds)

    def close(self) -> None:
        """End the threads and processes."""
        self.fail_pending_calls()
        self.wait_for_ends(CLOSE_SECONDS)
        for calls in self.calls.values():
            calls.close()
        for runner in self._runners.values():
            if runner.workers is not None:
                runner.workers.close()
