"""Calls of environments: in threads, in an event loop, or here, each until its deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from verl.environments.base import EpisodeFailed

Call = Callable[[], Coroutine[Any, Any, Any]]
_WATCH_SECONDS = 0.1


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


def late(timeout: float) -> EpisodeFailed:
    return EpisodeFailed(f"took longer than {timeout:g} s (environment.step_timeout)")


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Gives a future its end, unless it has one."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            is_plain = isinstance(error, Exception)
            future.set_exception(error if is_plain else EpisodeFailed(f"it raised {error!r}"))


def attempt(future: Future[Any], call: Call) -> None:
    """Runs a call here."""
    try:
        settle(future, at_once(call()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is a user's environment: anything may come, SystemExit too
        settle(future, error=error)


class Calls:
    """Calls of environments, each until its deadline, which counts from its start. A thread whose call takes
    longer can't be ended, nor can a loop that is held up: the call fails, and another one takes its place.
    """

    def __init__(self, max_threads: int) -> None:
        self.max_threads, self._num_threads, self._num_idle = max_threads, 0, 0
        self._changed = threading.Condition()
        self._queue: deque[tuple[Future[Any], Call, float]] = deque()
        self._running: dict[Future[Any], tuple[float, float, bool]] = {}  # -> deadline, timeout, in a thread
        self._loops: list[asyncio.AbstractEventLoop] = []  # the last is used, if it is not held up
        self._is_held_up, self._is_watched, self._is_over = True, False, False

    def in_thread(self, call: Call, timeout: float) -> Future[Any]:
        """Runs a call when a thread is free for it."""
        future: Future[Any] = Future()
        self._queue.append((future, call, timeout))
        self._staff()
        return future

    def in_loop(self, call: Call, timeout: float, turn: asyncio.Lock) -> Future[Any]:
        """Runs a call when it is its turn, and cancels it at its deadline. Where it can't be cancelled, it
        fails a little later.
        """
        with self._changed:
            if self._is_held_up:
                self._is_held_up = False
                self._loops.append(asyncio.new_event_loop())
                self._start(self._loops[-1].run_forever)
        future: Future[Any] = Future()
        latest = time.monotonic() + 2 * timeout + 1  # it may wait for its turn
        self._running[future] = (latest, timeout, False)
        future.add_done_callback(lambda _: self._running.pop(future, None))
        loop = self._loops[-1]

        async def run() -> None:
            limit = None
            try:
                async with turn, asyncio.timeout(timeout) as limit:
                    result = await call()
                settle(future, result)
            except BaseException as error:  # it is a user's environment; SystemExit would end the loop
                settle(future, error=late(timeout) if limit and limit.expired() else error)

        def begin() -> None:
            task = loop.create_task(run())
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

        loop.call_soon_threadsafe(begin)
        return future

    def expire(self, now: float) -> None:
        """Fails the calls that are late; now=inf: as the run ends, all that run or wait for a thread."""
        is_end, ended = now == math.inf, []
        with self._changed:
            for future, (deadline, timeout, in_thread) in list(self._running.items()):
                if deadline < now and self._running.pop(future, None) is not None:
                    self._num_threads -= in_thread
                    self._is_held_up |= not in_thread and not is_end
                    ended.append((future, timeout))
            while is_end and self._queue:
                ended.append((self._queue.popleft()[0], 0.0))
        for future, timeout in ended:
            settle(future, error=EpisodeFailed("the run ends") if is_end else late(timeout))
            self._staff()

    def close(self) -> None:
        """Its threads end with what is still to do."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.stop)

    def _start(self, target: Callable[[], None]) -> None:
        """Starts a thread; with the first one, the one that watches the deadlines."""

        def watch() -> None:
            while not self._is_over:
                time.sleep(_WATCH_SECONDS)
                self.expire(time.monotonic())

        for each in [target] if self._is_watched else [target, watch]:
            threading.Thread(target=each, name="environments", daemon=True).start()
        self._is_watched = True

    def _staff(self) -> None:
        """Has a thread do what waits: one that is idle, or another one."""

        def work() -> None:
            while True:
                with self._changed:
                    self._num_idle += 1
                    self._changed.wait_for(lambda: self._queue or self._is_over)
                    self._num_idle -= 1
                    if not self._queue:
                        return
                    future, call, timeout = self._queue.popleft()
                    if not future.set_running_or_notify_cancel():
                        continue
                    self._running[future] = (time.monotonic() + timeout, timeout, True)
                attempt(future, call)
                if self._running.pop(future, None) is None:
                    return  # another thread has its place

        with self._changed:
            if self._num_idle < len(self._queue) and self._num_threads < self.max_threads:
                self._num_threads += 1
                self._start(work)
            self._changed.notify()
