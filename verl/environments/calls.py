"""Calls of environments: here, in threads, or in an event loop, each until its deadline."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
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


def here(call: Callable[[], Any]) -> Any:
    """The result of a call that runs here. What it raises is an Exception, or a KeyboardInterrupt: a user's
    environment may raise anything, SystemExit too.
    """
    try:
        result = call()
        return at_once(result) if inspect.iscoroutine(result) else result
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EpisodeFailed(f"it raised {error!r}") from error


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Gives a future its end, unless it has one."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            is_plain = isinstance(error, Exception)
            future.set_exception(error if is_plain else EpisodeFailed(f"it raised {error!r}"))


def attempt(future: Future[Any], call: Callable[[], Any]) -> None:
    """Runs a call here, for a future."""
    try:
        settle(future, here(call))
    except Exception as error:
        settle(future, error=error)


def start(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a thread that nobody waits for when the program ends."""
    threading.Thread(target=function, args=arguments, name="environments", daemon=True).start()


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread of its own."""
    future: Future[Any] = Future()
    start(attempt, future, call)
    return future


class Calls:
    """Calls in an event loop of a thread: coroutines, or plain ones, for each of which it has a thread.

    A deadline counts from the start. What can't be ended there (a plain call, a coroutine that does not let
    itself be cancelled) fails all the same: a thread takes no place from then on, and a loop that is held up
    is left for a new one after twice the time.
    """

    def __init__(self, max_threads: int | None) -> None:
        """max_threads: of plain calls; None: they are coroutines."""
        self._places = None if max_threads is None else asyncio.Semaphore(max_threads)
        self._under_way: dict[Future[Any], tuple[float, float]] = {}  # -> when it is given up, its timeout
        self._loops: list[asyncio.AbstractEventLoop] = []  # the last is used, if it is not held up
        self._is_held_up = True
        self._is_over = False
        self._lock = threading.Lock()

    def submit(self, call: Call, timeout: float, turn: asyncio.Lock) -> Future[Any]:
        """Runs a call when it is its turn and there is a place for it. Where a coroutine can't be cancelled,
        it fails a little later.
        """
        with self._lock:
            if self._is_held_up:
                self._is_held_up = False
                self._loops.append(asyncio.new_event_loop())
                start(self._loops[-1].run_forever)
                if self._places is None and len(self._loops) == 1:
                    start(self._watch)
        future: Future[Any] = Future()
        if self._is_over:
            settle(future, error=EpisodeFailed("the run ends"))
            return future
        latest = time.monotonic() + 2 * timeout + 1  # it may wait for its turn
        self._under_way[future] = (latest, timeout)
        future.add_done_callback(lambda _: self._under_way.pop(future, None))
        loop = self._loops[-1]

        async def run() -> None:
            limit = None
            try:
                async with self._places or turn, asyncio.timeout(timeout) as limit:
                    if self._places is None:
                        settle(future, await call())
                    elif not future.done():
                        settle(future, await asyncio.wrap_future(in_thread(call)))
            except BaseException as error:  # it is a user's environment; SystemExit would end the loop
                is_late = limit is not None and limit.expired()
                settle(future, error=late(timeout) if is_late else error)

        def begin() -> None:
            task = loop.create_task(run())
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

        loop.call_soon_threadsafe(begin)
        return future

    def _watch(self) -> None:
        """Gives up coroutines that the loop can't end."""
        while not self._is_over:
            time.sleep(_WATCH_SECONDS)
            for future, (latest, timeout) in list(self._under_way.items()):
                if latest < time.monotonic():
                    self._is_held_up = True
                    settle(future, error=late(timeout))

    def give_up(self) -> None:
        """Fails all that run or wait, as the run ends."""
        for future in list(self._under_way):
            settle(future, error=EpisodeFailed("the run ends"))

    def close(self) -> None:
        """Its threads end with what they are at."""
        self._is_over = True
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.call_later, _WATCH_SECONDS, loop.stop)
