"""Where environments run: in the loop's own thread, in threads, or in processes that can be killed.

    stage = Environments(block, env_config)                      of one process
    runner = stage["maze"]
    episode = runner.open(extras, prompt, max_turns)             or a Future of it
    results = runner.step_many([episode, ...], [text, ...])      each an output, a Future of one, or an error
    runner.close(episode)                                        once, whatever happened; None or a Future

`environment.executor`: auto follows the class's `runs`. An exception of an environment, or a call that takes
longer than `environment.step_timeout`, is its own episode's end and nobody else's.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from verl.config.environments import EnvironmentConfig
from verl.environments.base import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    EpisodeFailed,
    Message,
    make_environment,
)
from verl.environments.env_process import Nursery, ProcessEnvironment
from verl.environments.registry import find_spec, load_class

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | Exception
HOW = ("inline", "thread", "process")
CLOSE_SECONDS = 10.0  # for all episodes of a run that ends in haste
_WATCH_SECONDS = 0.1


@dataclass(eq=False)
class Episode:
    """An environment in use.

    env: the environment, or what makes it (in a process). stop: strings that end a turn. messages: what its
    `init` wants to be shown; None: the row's prompt. seconds_init, seconds_step: in these, without waiting
    for a thread. metrics: its `get_metrics`, once it is closed. under_way: the call that it is at. is_over:
    it failed to open in time.
    """

    env: Any
    stop: tuple[str, ...] = ()
    messages: list[Message] | None = None
    seconds_init: float = 0.0
    seconds_step: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    under_way: Future[Any] | None = None
    is_over: bool = False


class WorkerThreads:
    """Threads that run calls, at most `max_workers` at a time. One whose call takes too long can't be ended:
    its call fails, and another thread takes its place.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self._changed = threading.Condition()
        self._queue: deque[tuple[Future[Any], Callable[[], Any], float]] = deque()
        self._late_at: dict[Future[Any], tuple[float, float]] = {}  # running -> (deadline, timeout)
        self._num_threads = self._num_idle = 0
        self._is_watched = False

    def submit(self, call: Callable[[], Any], timeout: float) -> Future[Any]:
        """Runs a call; it fails after `timeout` seconds, counted from its start."""
        future: Future[Any] = Future()
        with self._changed:
            self._queue.append((future, call, timeout))
            self._staff()
            self._changed.notify()
        return future

    def expire(self, is_over: bool = False) -> None:
        """Fails calls that are late; `is_over`: all that run, and those that wait to."""
        now, late = time.monotonic(), []
        with self._changed:
            for future, (deadline, timeout) in list(self._late_at.items()):
                if is_over or now > deadline:
                    del self._late_at[future]
                    self._num_threads -= 1
                    late.append((future, timeout))
            if is_over:
                late += [(future, timeout) for future, _, timeout in self._queue]
                self._queue.clear()
            self._staff()
        for future, timeout in late:
            why = "the run ends" if is_over else f"took longer than {timeout:g} s (environment.step_timeout)"
            if not future.cancelled():
                future.set_exception(EpisodeFailed(why))

    def _staff(self) -> None:
        """As many threads as there is work for."""
        while self._num_threads < self.max_workers and self._num_idle < len(self._queue):
            self._num_threads += 1
            self._num_idle += 1
            threading.Thread(target=self._work, name="environments", daemon=True).start()
        if self._queue and not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._watch, name="environments-watch", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                future, call, timeout = self._queue.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._num_idle -= 1
                self._late_at[future] = (time.monotonic() + timeout, timeout)
            result, error = None, None
            try:
                result = call()
            except BaseException as problem:  # it is a user's environment: anything may come
                error = problem
            with self._changed:
                if self._late_at.pop(future, None) is None:
                    return  # another thread has its place
                self._num_idle += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            self.expire()


class EnvironmentRunner:
    """The episodes of one environment in this process."""

    def __init__(
        self, env_class: str, env_config: Mapping[str, Any], block: EnvironmentConfig, threads: WorkerThreads
    ) -> None:
        """ValueError: there is no environment of this name."""
        cls = load_class(env_class)
        self.env_class, self.timeout, self.threads = env_class, block.step_timeout, threads
        self._cls, self._kwargs = cls, {**find_spec(env_class).kwargs, "env_config": dict(env_config)}
        self.how = getattr(cls, "runs", "thread") if block.executor == "auto" else block.executor
        if self.how not in HOW:
            raise ValueError(f"{env_class}: found runs={self.how!r}; expected one of {', '.join(HOW)}.")
        self.observation_end: str = getattr(cls, "observation_end", "")
        self.counts_turns: bool = getattr(cls, "counts_turns", False)
        self.stateless: bool = getattr(cls, "stateless", False)
        self._steps_many = getattr(cls, "step_many", None) if self.how != "process" else None
        self._own = {  # methods that do something
            name: (function := getattr(cls, name, None)) is not None
            and function is not getattr(BaseTextEnv, name)
            for name in ("init", "close", "get_metrics")
        }
        self._nursery = Nursery(cls.__module__, block.max_workers) if self.how == "process" else None
        self._has_complained = False
        self.ends: set[Future[None]] = set()  # of episodes that are being closed

    def open(
        self,
        extras: Mapping[str, Any],
        prompt: list[Message],
        max_turns: int,
        num_turns: int = 0,
        state: bytes | None = None,
    ) -> Episode | Future[Episode]:
        """Makes an environment for an episode.

        Args:
            extras, prompt: of its row. max_turns: most actions of an episode.
            num_turns: that a stateless one has behind it. state: of `keep`, of one that goes on.
        """
        arguments = (self._cls, {**self._kwargs, "extras": {**extras, "max_turns": max_turns}}, max_turns)
        if self._nursery is not None:
            stop = getattr(self._cls, "stop", ())
            env = ProcessEnvironment(self._nursery, arguments, self.timeout)
            episode = Episode(env, tuple(stop) if isinstance(stop, tuple | list) else ())
            if not self._own["init"]:
                return episode
        else:
            episode = Episode(None)

        def begin() -> Episode:
            started = time.perf_counter()
            if episode.env is None:
                episode.env = make_environment(*arguments) if state is None else pickle.loads(state)
                episode.stop = tuple(getattr(episode.env, "stop", ()))
                if num_turns:
                    episode.env.turns = num_turns
            if episode.is_over:  # it took too long
                self._end(episode)
            elif self._own["init"] and state is None:
                episode.messages = list(episode.env.init(prompt)[0])
            episode.seconds_init = time.perf_counter() - started
            return episode

        if self.how == "inline":
            try:
                return begin()
            except Exception:
                self._end(episode)
                raise
        opened = self._submit(episode, begin)

        def check(done: Future[Episode]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._give_up(episode)

        opened.add_done_callback(check)
        return opened

    def step_many(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[StepResult]:
        """Takes an action in each episode."""
        if self._steps_many is not None:
            results = self._steps_many([episode.env for episode in episodes], actions)
            if results is not None:
                for episode, result in zip(episodes, results, strict=True):
                    episode.under_way = result if isinstance(result, Future) else None
                return results
        return [self._step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def _step(self, episode: Episode, action: str) -> StepResult:
        def take() -> BaseTextEnvStepOutput:
            started = time.perf_counter()
            try:
                return episode.env.step(action)
            finally:
                episode.seconds_step += time.perf_counter() - started

        if self.how != "inline":
            return self._submit(episode, take)
        try:
            return take()
        except Exception as error:  # it is a user's environment: anything may come
            return error

    def keep(self, episode: Episode) -> bytes | None:
        """The environment for a later `open`; None: it can't be kept."""
        if self.how == "process" or (episode.under_way is not None and not episode.under_way.done()):
            return None
        try:
            return pickle.dumps(episode.env)
        except Exception:  # pickling raises all kinds
            return None

    def close(self, episode: Episode) -> Future[None] | None:
        """Ends an episode, after the call that it is at; None: it has ended."""
        if self._nursery is None and not (self._own["close"] or self._own["get_metrics"]):
            return None
        if self.how == "inline":
            self._end(episode)
            return None
        ended: Future[None] = Future()
        self.ends.add(ended)
        ended.add_done_callback(self.ends.discard)

        def begin(_: object = None) -> None:
            job = self._submit(episode, lambda: self._end(episode))
            job.add_done_callback(lambda _: ended.set_result(None))

        if episode.under_way is not None and not episode.under_way.done():
            episode.under_way.add_done_callback(begin)
        else:
            begin()
        return ended

    def shut_down(self) -> None:
        """Ends its processes."""
        if self._nursery is not None:
            self._nursery.close()

    def _submit(self, episode: Episode, call: Callable[[], Any]) -> Future[Any]:
        # A process is killed in time; its thread is not to be given up before.
        slack = 2.0 if self._nursery is not None else 0.0
        episode.under_way = self.threads.submit(call, self.timeout + slack)
        return episode.under_way

    def _give_up(self, episode: Episode) -> None:
        """Its `init` failed."""
        episode.is_over = True
        if episode.env is not None:
            self.close(episode)

    def _end(self, episode: Episode) -> None:
        """`get_metrics` and `close` of an environment that was made."""
        env = episode.env
        if env is None or (isinstance(env, ProcessEnvironment) and not env.can_end()):
            return
        try:
            try:
                if self._own["get_metrics"]:
                    episode.metrics = dict(env.get_metrics())
            finally:
                if self._own["close"]:
                    env.close()
                if isinstance(env, ProcessEnvironment):
                    env.give_back()
        except Exception as error:  # it is a user's environment; its episode is over all the same
            if not self._has_complained:
                print(f"note: environment {self.env_class}: the end of an episode failed: {error!r}")
            self._has_complained = True


class Environments:
    """The environments of this process, made as they are asked for."""

    def __init__(
        self,
        block: EnvironmentConfig | None = None,
        env_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """block: the run's. env_config: environment -> more of what its instances are made with."""
        self.block, self.env_config = block or EnvironmentConfig(), env_config or {}
        self.threads = WorkerThreads(self.block.max_workers)
        self._runners: dict[str, EnvironmentRunner] = {}

    def __getitem__(self, env_class: str) -> EnvironmentRunner:
        if env_class not in self._runners:
            config = {**self.block.env_config.get(env_class, {}), **self.env_config.get(env_class, {})}
            self._runners[env_class] = EnvironmentRunner(env_class, config, self.block, self.threads)
        return self._runners[env_class]

    def wait_for_ends(self, in_haste: bool) -> None:
        """Until the episodes are closed that are over. in_haste: what they are at is given up."""
        if in_haste:
            self.threads.expire(is_over=True)
        ends = [end for runner in self._runners.values() for end in list(runner.ends)]
        wait(ends, CLOSE_SECONDS if in_haste else None)

    def close(self) -> None:
        """Ends threads' work and processes."""
        self.threads.expire(is_over=True)
        for runner in self._runners.values():
            runner.shut_down()
