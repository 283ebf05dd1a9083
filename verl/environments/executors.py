"""Where environments run: in the loop's own thread, in threads, in processes that can be killed, or, if their
`step` is a coroutine function, in an event loop.

    stage = Environments(block, env_config)                      of one process
    runner = stage["maze"]
    episode = runner.open(extras, prompt, max_turns)             or a Future of it
    results = runner.step_many([episode, ...], [text, ...])      each an output, a Future of one, or an error
    runner.close(episode)                                        once, whatever happened; None or a Future

`environment.executor`: auto follows the class's `runs`. At most `max_workers` threads wait for others (so
many cost little, and fewer would hold up a batch), and coroutines in any number; of processes, which compute,
MOST_COMPUTING do at a time. An exception of an environment, or a call that takes longer than
`environment.step_timeout`, is its own episode's end and nobody else's.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
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
from verl.environments.threads import AsyncCall, EventLoopThread, WorkerThreads

StepResult = BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | Exception
HOW = ("inline", "thread", "process")
MOST_COMPUTING = 32
CLOSE_SECONDS = 10.0  # for all episodes of a run that ends in haste


@dataclass(eq=False)
class Episode:
    """An environment in use.

    env: the environment, or what makes it (in a process). stop: strings that end a turn. messages: what its
    `init` wants to be shown; None: the row's prompt. seconds_init, seconds_step: in these, without waiting
    for a thread. metrics: its `get_metrics`, once it is closed. under_way: the call that it is at. is_over:
    it failed to open in time. has_ended: it is closed, or about to be. turn: of one coroutine at a time.
    """

    env: Any
    stop: tuple[str, ...] = ()
    messages: list[Message] | None = None
    seconds_init: float = 0.0
    seconds_step: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    under_way: Future[Any] | None = None
    is_over: bool = False
    has_ended: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


async def settled(value: Any) -> Any:
    """What a method returned, or what its coroutine returns."""
    return await value if inspect.isawaitable(value) else value


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that awaits nothing but `settled` values."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError("found a coroutine function beside a plain step; expected step to be one too")


class EnvironmentRunner:
    """The episodes of one environment in this process."""

    def __init__(
        self,
        env_class: str,
        env_config: Mapping[str, Any],
        block: EnvironmentConfig,
        threads: WorkerThreads,
        event_loop: EventLoopThread,
    ) -> None:
        """ValueError: there is no environment of this name."""
        cls = load_class(env_class)
        self.env_class, self.timeout = env_class, block.step_timeout
        self.threads, self.event_loop = threads, event_loop
        self._cls, self._kwargs = cls, {**find_spec(env_class).kwargs, "env_config": dict(env_config)}
        self.how = getattr(cls, "runs", "thread") if block.executor == "auto" else block.executor
        if self.how not in HOW:
            raise ValueError(f"{env_class}: found runs={self.how!r}; expected one of {', '.join(HOW)}.")
        if inspect.iscoroutinefunction(getattr(cls, "step", None)):
            if block.executor in ("inline", "process"):
                raise ValueError(
                    f"Found environment.executor={block.executor} with {env_class}, whose step is a "
                    "coroutine function and runs in an event loop; expected auto."
                )
            self.how = "async"
        self.observation_end: str = getattr(cls, "observation_end", "")
        self.counts_turns: bool = getattr(cls, "counts_turns", False)
        self.stateless: bool = getattr(cls, "stateless", False)
        self._steps_many = getattr(cls, "step_many", None) if self.how != "process" else None
        self._own = {  # methods that do something
            name: (function := getattr(cls, name, None)) is not None
            and function is not getattr(BaseTextEnv, name)
            for name in ("init", "close", "get_metrics")
        }
        self.nursery = None
        if self.how == "process":
            most = min(block.max_workers, MOST_COMPUTING)
            self.nursery, self.threads = Nursery(cls.__module__, most), WorkerThreads(most)
        self._has_complained = False
        self._lock = threading.Lock()
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
        if self.nursery is not None:
            stop = getattr(self._cls, "stop", ())
            env = ProcessEnvironment(self.nursery, arguments, self.timeout)
            episode = Episode(env, tuple(stop) if isinstance(stop, tuple | list) else ())
            if not self._own["init"]:
                return episode
        else:
            episode = Episode(None)

        async def begin() -> Episode:
            started = time.perf_counter()
            if episode.env is None:
                episode.env = make_environment(*arguments) if state is None else pickle.loads(state)
                episode.stop = tuple(getattr(episode.env, "stop", ()))
                if num_turns and state is None:
                    episode.env.turns = num_turns
            if episode.is_over:  # it took too long
                await self._end(episode)
            elif self._own["init"] and state is None:
                episode.messages = list((await settled(episode.env.init(prompt)))[0])
            episode.seconds_init = time.perf_counter() - started
            return episode

        if self.how == "inline":
            try:
                return at_once(begin())
            except (Exception, SystemExit) as error:
                at_once(self._end(episode))
                raise (
                    error if isinstance(error, Exception) else EpisodeFailed(f"it raised {error!r}")
                ) from None
        opened = self._submit(episode, begin)

        def check(done: Future[Episode]) -> None:
            if done.cancelled() or done.exception() is not None:
                episode.is_over = True
                if episode.env is not None:
                    self.close(episode)

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
                    episode.under_way = result if isinstance(result, Future) else None
                return results
        return [self._step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def _step(self, episode: Episode, action: str) -> StepResult:
        async def take() -> BaseTextEnvStepOutput:
            started = time.perf_counter()
            try:
                return await settled(episode.env.step(action))
            finally:
                episode.seconds_step += time.perf_counter() - started

        if self.how != "inline":
            return self._submit(episode, take)
        try:
            return at_once(take())
        except (Exception, SystemExit) as error:  # it is a user's environment: anything may come
            return error if isinstance(error, Exception) else EpisodeFailed(f"it raised {error!r}")

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
        if self.nursery is None and not (self._own["close"] or self._own["get_metrics"]):
            return None
        if self.how == "inline":
            at_once(self._end(episode))
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

    def _submit(self, episode: Episode, call: AsyncCall) -> Future[Any]:
        if self.how == "async":
            episode.under_way = self.event_loop.submit(call, episode.turn, self.timeout)
            return episode.under_way
        # A process is killed in time; its thread is not to be given up before.
        slack = 2.0 if self.nursery is not None else 0.0
        episode.under_way = self.threads.submit(lambda: at_once(call()), self.timeout + slack)
        return episode.under_way

    async def _end(self, episode: Episode) -> None:
        """`get_metrics` and `close` of an environment that was made, once."""
        with self._lock:
            env, has_ended, episode.has_ended = episode.env, episode.has_ended, episode.env is not None
        if env is None or has_ended or (isinstance(env, ProcessEnvironment) and not env.can_end()):
            return
        try:
            try:
                if self._own["get_metrics"]:
                    episode.metrics = dict(await settled(env.get_metrics()))
            finally:
                if self._own["close"]:
                    await settled(env.close())
                if isinstance(env, ProcessEnvironment):
                    env.give_back()
        except (Exception, SystemExit) as error:  # a user's environment; its episode is over all the same
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
        self.threads, self.event_loop = WorkerThreads(self.block.max_workers), EventLoopThread()
        self._runners: dict[str, EnvironmentRunner] = {}

    def __getitem__(self, env_class: str) -> EnvironmentRunner:
        if env_class not in self._runners:
            config = {**self.block.env_config.get(env_class, {}), **self.env_config.get(env_class, {})}
            self._runners[env_class] = EnvironmentRunner(
                env_class, config, self.block, self.threads, self.event_loop
            )
        return self._runners[env_class]

    def give_up(self) -> None:
        """Ends every call that is under way; to be said before episodes are closed in haste."""
        for runner in self._runners.values():
            runner.threads.expire(is_over=True)
        self.event_loop.cancel_all()

    def wait_for_ends(self, seconds: float | None = None) -> None:
        """Until the episodes are closed that are over."""
        wait([end for runner in self._runners.values() for end in list(runner.ends)], seconds)

    def close(self) -> None:
        """Ends threads and processes."""
        self.give_up()
        self.wait_for_ends(CLOSE_SECONDS)
        for runner in self._runners.values():
            runner.threads.close()
            if runner.nursery is not None:
                runner.nursery.close()
        self.threads.close()
        self.event_loop.close()
