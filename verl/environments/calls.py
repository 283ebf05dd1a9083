"""Calls of environments: in the caller's thread, in other threads, or in an event loop.

A call in a thread of `CallPool` or in an event loop has a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from verl.environments.environment import EpisodeFailed

Call = Callable[[], Coroutine[Any, Any, Any]]
_WATCH_SECONDS = 0.1


async def await_if_needed(value: Any) -> Any:
    """Return a value, or the result of awaiting it if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that awaits nothing but `await_if_needed` values, and return its result.

    Raises TypeError if the coroutine waits for anything.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError("found a coroutine function beside a plain step; expected step to be one too")


def timeout_error(timeout: float) -> EpisodeFailed:
    return EpisodeFailed(f"took longer than {timeout:g} s (environment.step_timeout)")


def run_in_this_thread(call: Callable[[], Any]) -> Any:
    """Run a call in this thread and return its result.

    It raises nothing but an Exception or a KeyboardInterrupt. A user's environment may raise anything else,
    such as SystemExit, which becomes an EpisodeFailed.
    """
    try:
        result = call()
        return run_without_waiting(result) if inspect.iscoroutine(result) else result
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EpisodeFailed(f"it raised {error!r}") from error


def complete_future(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Set the result or the exception of a future, unless it is done already."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            is_plain = isinstance(error, Exception)
            future.set_exception(error if is_plain else EpisodeFailed(f"it raised {error!r}"))


def attempt(future: Future[Any], call: Callable[[], Any]) -> None:
    """Run a call in this thread, and set its result or exception on a future."""
    try:
        complete_future(future, run_in_this_thread(call))
    except Exception as error:
        complete_future(future, error=error)


def start(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a daemon thread, which nobody waits for when the program ends."""
    threading.Thread(target=function, args=arguments, name="environments", daemon=True).start()


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in a thread of its own, and return a future of its result."""
    future: Future[Any] = Future()
    start(attempt, future, call)
    return future


class CallPool:
    """The calls that run in an event loop, which has a thread of its own.

    The calls are either coroutines, or plain calls that get a thread each. A deadline counts from the start
    of the call. A call that can't be ended at its deadline (a plain call, or a coroutine that can't be
    cancelled) fails all the same. Its thread then no longer counts towards `max_threads`. A loop that is held
    up is replaced by a new one after twice the time.
    """

    def __init__(self, max_threads: int | None) -> None:
        """Prepare for calls.

        The first call starts the event loop.

        Args:
            max_threads: The most plain calls that run at a time. None if the calls are coroutines.
        """
        self._thread_slots = None if max_threads is None else asyncio.Semaphore(max_threads)
        # Maps each call to the time at which it is given up, and its timeout in seconds.
        self._under_way: dict[Future[Any], tuple[float, float]] = {}
        self._loops: list[asyncio.AbstractEventLoop] = []  # the last one is in use, unless it is held up
        self._is_held_up = True
        self._is_over = False
        self._lock = threading.Lock()

    def submit(self, call: Call, timeout: float, episode_lock: asyncio.Lock) -> Future[Any]:
        """Run a call when it is its turn and a thread is free for it, and return a future of its result.

        A coroutine that can't be cancelled fails a little later than after `timeout`.

        Args:
            call: The call to run.
            timeout: The seconds that the call may take from its start.
            episode_lock: A lock that the call holds while it runs, if the calls are coroutines.
        """
        with self._lock:
            if self._is_held_up:
                self._is_held_up = False
                self._loops.append(asyncio.new_event_loop())
                start(self._loops[-1].run_forever)
                if self._thread_slots is None and len(self._loops) == 1:
                    start(self._watch)
        future: Future[Any] = Future()
        if self._is_over:
            complete_future(future, error=EpisodeFailed("the run ends"))
            return future
        latest = time.monotonic() + 2 * timeout + 1  # the call may wait for its turn
        self._under_way[future] = (latest, timeout)
        future.add_done_callback(lambda _: self._under_way.pop(future, None))
        loop = self._loops[-1]

        async def run() -> None:
            limit = None
            try:
                async with self._thread_slots or episode_lock, asyncio.timeout(timeout) as limit:
                    if self._thread_slots is None:
                        complete_future(future, await call())
                    elif not future.done():
                        complete_future(future, await asyncio.wrap_future(in_thread(call)))
            # A user's environment may raise anything. SystemExit would end the loop.
            except BaseException as error:
                is_late = limit is not None and limit.expired()
                complete_future(future, error=timeout_error(timeout) if is_late else error)

        def begin() -> None:
            task = loop.create_task(run())
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

        loop.call_soon_threadsafe(begin)
        return future

    def _watch(self) -> None:
        """Fail the coroutines that the loop can't end, until the calls are closed."""
        while not self._is_over:
            time.sleep(_WATCH_SECONDS)
            for future, (latest, timeout) in list(self._under_way.items()):
                if latest < time.monotonic():
                    self._is_held_up = True
                    complete_future(future, error=timeout_error(timeout))

    def fail_pending(self) -> None:
        """Fail all calls that run or wait, because the run ends."""
        for future in list(self._under_way):
            complete_future(future, error=EpisodeFailed("the run ends"))

    def close(self) -> None:
        """Let each thread end after the work that it is doing."""
        self._is_over = True
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.call_later, _WATCH_SECONDS, loop.stop)
