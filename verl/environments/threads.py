"""Threads that run calls of environments until their time is over, and a thread with an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from verl.environments.base import EpisodeFailed

AsyncCall = Callable[[], Coroutine[Any, Any, Any]]
_WATCH_SECONDS = 0.1


def late(timeout: float) -> EpisodeFailed:
    return EpisodeFailed(f"took longer than {timeout:g} s (environment.step_timeout)")


class EventLoopThread:
    """A thread with an event loop, made when it is needed; another one after a call that can't be ended."""

    def __init__(self) -> None:
        self._loops: list[asyncio.AbstractEventLoop] = []  # the last is used, unless it is stuck
        self._is_stuck = True
        self._running: dict[Future[Any], tuple[float, float]] = {}  # -> (deadline, timeout)
        self._is_over = threading.Event()

    def submit(self, call: AsyncCall, turn: asyncio.Lock, timeout: float) -> Future[Any]:
        """Runs a call when it is its turn. After `timeout` seconds it is cancelled and fails; one that can't
        be cancelled, or holds the loop up, fails a little later.
        """
        if self._is_stuck:
            self._is_stuck = False
            self._loops.append(asyncio.new_event_loop())
            targets = [self._loops[-1].run_forever, *[self._watch] * (len(self._loops) == 1)]
            for target in targets:
                threading.Thread(target=target, name="environments-async", daemon=True).start()
        future: Future[Any] = Future()
        self._running[future] = (time.monotonic() + 2 * timeout + 1, timeout)  # it may wait for its turn

        async def run() -> Any:
            task = asyncio.current_task()
            assert task is not None
            try:
                async with turn, asyncio.timeout(timeout) as limit:
                    return await call()
            except Exception as problem:  # it is a user's environment: anything may come
                raise late(timeout) if limit.expired() else problem from None
            except BaseException as problem:
                if task.cancelling():
                    raise
                raise EpisodeFailed(f"it raised {problem!r}") from None  # which would end the loop

        def pass_on(done: Future[Any]) -> None:
            with suppress(InvalidStateError):  # it was given up
                error = EpisodeFailed("it was cancelled") if done.cancelled() else done.exception()
                if error is None:
                    future.set_result(done.result())
                else:
                    future.set_exception(error)

        def leave(_: object) -> None:
            self._running.pop(future, None)
            inner.cancel()

        inner = asyncio.run_coroutine_threadsafe(run(), self._loops[-1])
        future.add_done_callback(leave)
        inner.add_done_callback(pass_on)
        return future

    def cancel_all(self) -> None:
        """Ends all that runs."""
        for future in list(self._running):
            with suppress(InvalidStateError):  # it has ended just now
                future.set_exception(EpisodeFailed("the run ends"))

    def close(self) -> None:
        """Ends its threads."""
        self._is_over.set()
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.stop)

    def _watch(self) -> None:
        while not self._is_over.wait(_WATCH_SECONDS):
            for future, (deadline, timeout) in list(self._running.items()):
                if time.monotonic() > deadline:
                    self._is_stuck = True
                    with suppress(InvalidStateError):  # it has ended just now
                        future.set_exception(late(timeout))


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
        self._is_watched = self._is_over = False

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
        now, ended = time.monotonic(), []
        with self._changed:
            for future, (deadline, timeout) in list(self._late_at.items()):
                if is_over or now > deadline:
                    del self._late_at[future]
                    self._num_threads -= 1
                    ended.append((future, timeout))
            if is_over:
                ended += [(future, timeout) for future, _, timeout in self._queue]
                self._queue.clear()
            self._staff()
        for future, timeout in ended:
            if not future.cancelled():
                future.set_exception(EpisodeFailed("the run ends") if is_over else late(timeout))

    def close(self) -> None:
        """Its threads end with what is still to do."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

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
                    if self._is_over:
                        return
                    self._changed.wait()
                future, call, timeout = self._queue.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._num_idle -= 1
                self._late_at[future] = (time.monotonic() + timeout, timeout)
            result, error = None, None
            try:
                result = call()
            except Exception as problem:  # it is a user's environment: anything may come
                error = problem
            except BaseException as problem:
                error = EpisodeFailed(f"it raised {problem!r}")
            with self._changed:
                if self._late_at.pop(future, None) is None:
                    return  # another thread has its place
                self._num_idle += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _watch(self) -> None:
        while not self._is_over:
            time.sleep(_WATCH_SECONDS)
            self.expire()
