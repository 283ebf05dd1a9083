"""The places where environments run.

Environments run in the loop's own thread, in other threads, or in processes that can be killed. If their
`step` is a coroutine function, they run in an event loop.

    environments = Environments(block, env_config)               of one process
    runner = environments["maze"]
    handle = runner.open(extras, prompt, max_turns)              or a Future of it
    results = runner.step_many([handle, ...], [text, ...])       each an output, a Future of one, or an error
    runner.close(handle)                                         once, whatever happened

An environment is opened (made, and its `init` called), stepped and closed (its metrics read, and its `close`
called). `EnvironmentRunner` has two methods for each act: the public one says where the act runs, and the
coroutine beside it (`_open_environment`, `_step_environment`, `_close_environment`) is the act itself.

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
    env_config_of,
    make_environment,
)
from verl.environments.registry import load_class
from verl.verifiers.workers import CheckFailed, KillableProcess, KillableWorkers, ProcessEnded

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | ActionUnderWay | Exception
MOST_COMPUTING = 32
CLOSE_SECONDS = 10.0  # the time for closing all environments of a run that ends in haste


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
        is_closed: Whether it was closed. An environment that is made after that is closed at once.
        lock: A lock that lets one coroutine run at a time.
    """

    env: Any = None
    stop: tuple[str, ...] = ()
    messages: list[Message] | None = None
    seconds_init: float = 0.0
    seconds_step: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    under_way: Future[Any] | None = None
    is_closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        method: "import" for a module, "make" for the environment, "close" to close it and return its metrics,
            or the name of one of its methods.
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
    if method == "close":
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
        self.is_busy = False
        self.is_closed = False
        stop = getattr(cls, "stop", ())
        self.stop = stop if isinstance(stop, tuple | list) else ()
        self.process: KillableProcess | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the environment in its process.

        Raises EpisodeFailed if the method raised, or if the process was killed or can't be started.
        """
        self.is_busy = True
        try:
            if self.process is None:
                self.process = self.workers.take()
                if self.is_closed:  # the process has started too late
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
        self.is_closed = True
        if self.process is not None and self.is_busy:
            self.process.kill()

    def get_metrics(self) -> dict[str, Any]:
        """Close the environment and return its metrics.

        This is the last call. Another episode may use the process afterwards.
        """
        metrics: dict[str, Any] = {}
        if not self.is_busy and self.process is not None and self.process.is_alive:
            try:
                metrics = self.call("close")
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
        self._kwargs = {**default_kwargs, "env_config": env_config_of(cls, env_config)}
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
        self.closing: set[Future[None]] = set()  # one future for each environment that is being closed

    def open(
        self,
        row: Mapping[str, Any],
        prompt: Any,
        max_turns: int,
        num_turns: int = 0,
    ) -> EnvironmentHandle | Future[EnvironmentHandle]:
        """Open an environment for an episode, and return its handle or a future of it.

        Args:
            row: The columns of the row.
            prompt: The messages of the prompt.
            max_turns: The most actions of the episode.
            num_turns: The number of turns behind a stateless environment that goes on.
        """
        handle = EnvironmentHandle()
        call = partial(self._open_environment, handle, row, prompt, max_turns, num_turns)
        if self.workers is not None and not self._has_init:
            return run_without_waiting(call())
        if self.executor_kind == "inline":
            try:
                return run_in_this_thread(call)
            except Exception:
                self.close(handle)
                raise
        opened = self._submit(handle, call)
        opened.add_done_callback(partial(self._close_if_failed, handle))
        return opened

    async def _open_environment(
        self,
        handle: EnvironmentHandle,
        row: Mapping[str, Any],
        prompt: Any,
        max_turns: int,
        num_turns: int,
    ) -> EnvironmentHandle:
        """Make the environment of a handle, and call its `init`."""
        started = time.perf_counter()
        kwargs = {**self._kwargs, "extras": {**row, "max_turns": max_turns}}
        env = make_environment(self._cls, kwargs)
        if num_turns:
            env.turns = num_turns
        check_stop(getattr(env, "stop", ()))
        handle.env = env
        if handle.is_closed:  # making the environment took too long
            await self._close_environment(handle)
        elif self._has_init:
            shown = await await_if_needed(env.init(prompt))
            is_pair = isinstance(shown, tuple | list) and len(shown) == 2
            if not is_pair or not isinstance(shown[0], tuple | list):
                raise EpisodeFailed(f"init returned {shown!r:.200}; expected (messages, information)")
            handle.messages = list(shown[0])
        handle.stop = tuple(getattr(env, "stop", ()))
        handle.seconds_init = time.perf_counter() - started
        return handle

    def _close_if_failed(self, handle: EnvironmentHandle, opened: Future[EnvironmentHandle]) -> None:
        """Close what is there of an environment that could not be opened."""
        if opened.cancelled() or opened.exception() is not None:
            self.close(handle)

    def step_many(self, handles: Sequence[EnvironmentHandle], actions: Sequence[str]) -> list[StepResult]:
        """Step environments, and return an output, a future of one, or an error for each."""
        if self._steps_many is not None:
            try:
                results = self._steps_many([handle.env for handle in handles], actions)
            except Exception as error:  # a user's environment may raise anything
                results = [error] * len(handles)
            if results is not None:
                for handle, result in zip(handles, results, strict=True):
                    future = result.future if isinstance(result, ActionUnderWay) else result
                    handle.under_way = future if isinstance(future, Future) else None
                return results
        return [self._step(handle, action) for handle, action in zip(handles, actions, strict=True)]

    def _step(self, handle: EnvironmentHandle, action: str) -> StepResult:
        """Step one environment whose class has no `step_many`."""
        call = partial(self._step_environment, handle, action)
        try:
            return run_in_this_thread(call) if self.executor_kind == "inline" else self._submit(handle, call)
        except Exception as error:  # a user's environment may raise anything
            return error

    async def _step_environment(self, handle: EnvironmentHandle, action: str) -> BaseTextEnvStepOutput:
        """Call the `step` of an environment, and note its time and the stop strings after it."""
        started = time.perf_counter()
        try:
            return await await_if_needed(handle.env.step(action))
        finally:
            handle.stop = tuple(getattr(handle.env, "stop", ()))  # `stop` may change from turn to turn
            handle.seconds_step += time.perf_counter() - started

    def close(self, handle: EnvironmentHandle) -> None:
        """Close an environment, after the call that is under way."""
        if self._needs_no_close:  # This holds for most episodes, as they are searches.
            handle.env = None
            handle.is_closed = True
            return
        closed: Future[None] = Future()
        self.closing.add(closed)
        closed.add_done_callback(self.closing.discard)
        if handle.under_way is None or self.executor_kind == "inline":
            self._submit_close(handle, closed)
        else:
            handle.under_way.add_done_callback(lambda _: self._submit_close(handle, closed))

    def _submit_close(self, handle: EnvironmentHandle, closed: Future[None]) -> None:
        """Have an environment closed, and set `closed` afterwards."""
        if isinstance(handle.env, ProcessEnvironment):
            handle.env.kill_if_busy()  # at once, because closing may wait for a thread
        call = self._submit(handle, partial(self._close_environment, handle))
        call.add_done_callback(partial(self._report_close, closed))

    async def _close_environment(self, handle: EnvironmentHandle) -> None:
        """Close an environment if it was made, and only once."""
        with self._lock:
            env = handle.env
            handle.env = None
            handle.is_closed = True
        if env is not None:
            await close_and_collect_metrics(env, handle.metrics)

    def _report_close(self, closed: Future[None], call: Future[None]) -> None:
        """Print the first error of a `close`, and set `closed`."""
        error = call.exception()
        if error is not None and not self._has_complained:
            self._has_complained = True
            print(f"note: environment {self.env_class}: the end of an episode failed: {error!r}")
        closed.set_result(None)

    def _submit(self, handle: EnvironmentHandle, call: Call) -> Future[Any]:
        """Run a call of an environment where its calls run, and return a future of the result."""
        if self.executor_kind == "inline":
            future: Future[Any] = Future()
            attempt(future, call)
            return future
        handle.under_way = self.calls[self.executor_kind].submit(call, self.timeout, handle.lock)
        return handle.under_way


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

        Use this before you close environments in haste.
        """
        for calls in self.calls.values():
            calls.fail_pending()

    def wait_until_closed(self, seconds: float | None = None) -> None:
        """Wait for the environments that are being closed, for at most `seconds` if it is given."""
        closing: list[Future[None]] = []
        for runner in self._runners.values():
            closing += list(runner.closing)
        wait(closing, seconds)

    def close(self) -> None:
        """End the threads and processes."""
        self.fail_pending_calls()
        self.wait_until_closed(CLOSE_SECONDS)
        for calls in self.calls.values():
            calls.close()
        for runner in self._runners.values():
            if runner.workers is not None:
                runner.workers.close()
