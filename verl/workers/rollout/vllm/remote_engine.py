"""Rollouts on vLLM servers of their own: `RolloutEngine` (verl/workers/rollout/base.py) over HTTP.

    owner's thread:  open, resume, close, step, load_weights
                          |  turns             ^  turns that ended (a queue)
    event loop thread:    v                    |
                     a task per turn -> POST /v1/completions -> tokens -> stop strings, end of sequence
                                        at the same server for all turns of a session

vLLM has no sessions. A session here is its token ids; each turn is a request with all of them, sent to the
same server, whose prefix cache makes the next turn cheap. What ends a turn is decided here, on the tokens as
they arrive; what a server sent beyond is dropped. So a turn can be broken off at any token and go on, there
or at another server, from the tokens that it has: that is how it lives through new weights, and through the
end of a server. The random numbers of a token depend on the session's seed and its position alone
(`sampler.py`), so that such a break changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from verl.workers.rollout.base import (
    Completion,
    EngineUnavailable,
    Partial,
    SamplingParams,
    checked_prompt,
    checked_tokens,
)
from verl.workers.rollout.vllm.server import VllmServers
from verl.workers.rollout.vllm.server_client import (
    RequestRefused,
    ServerClient,
    ServerFailed,
    completion_body,
)
from verl.workers.rollout.vllm.server_pool import RPC_SECONDS, ServerPool
from verl.workers.rollout.vllm.session import VllmSession, check_supported
from verl.workers.rollout.vllm.weight_transfer import ServerWorkers, WeightSender

T = TypeVar("T")

_STEP_SECONDS = 0.02  # how long `step` waits for a turn to end
_FAILURES = 5  # requests of a turn that fail in a row, without a token, though the server says it is healthy


@dataclass(eq=False)
class _RemoteSession(VllmSession):
    """A session, the server that it is at, and the task that runs its turn (the loop's thread)."""

    server: ServerClient = None  # type: ignore[assignment]
    task: asyncio.Task[None] | None = None


class RemoteVllmEngine:
    """`RolloutEngine` on vLLM servers that run already.

    Several engines (one per trainer process) may share the servers: each runs its own sessions, and one of
    them sends the weights.

    Attributes:
        max_model_len: most tokens of one session, prompt and observations included.
        version: of the present weights; -1 before the first `load_weights`.
    """

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        max_model_len: int,
        vocab_size: int,
        sender: WeightSender | None,
        servers: VllmServers | None = None,
        rank: int = 0,
        max_requests: int = 1024,
        stream_interval: int = 8,
        stall_timeout: float = 600.0,
        patience: float = 10.0,
        update_timeout: float = 1800.0,
    ) -> None:
        """Connect.

        Args:
            server_urls: base addresses, "http://host:port".
            max_model_len: most tokens of one session; the servers must allow as many.
            vocab_size: token ids are smaller.
            sender: brings new weights to the servers. None: another process does, and `load_weights` waits
                until the servers have them.
            servers: those that were started for this engine: ended by `shutdown`, and quoted in errors.
            rank: of this process among those that share the servers: they begin with different ones.
            max_requests: most requests in flight.
            stream_interval: tokens that a server collects before it sends them; `partial` lags behind by so
                many. A turn's end is sent at once.
            stall_timeout: seconds without a byte after which a server is asked whether it still works.
            patience: seconds that a server may not answer before it is given up.
            update_timeout: seconds that another process may take to send the weights.

        Raises:
            ValueError: no address, or a server that does not fit.
            RuntimeError: a server does not answer.
        """
        if not server_urls:
            raise ValueError("server_urls is empty; rollouts apart need at least one vLLM server")
        self.max_model_len = max_model_len
        self.version = -1
        self._vocab_size = vocab_size
        self._sender = sender
        self._servers = servers
        self._rank = rank
        self._stream_interval = stream_interval
        self._update_timeout = update_timeout
        self._sessions: dict[int, _RemoteSession] = {}
        self._under_way: set[int] = set()  # of those, whose present turn `step` has not returned yet
        self._next_id = 0
        self._has_weights = False
        self._failure: BaseException | None = None
        self._counts = {"steps": 0, "generated_tokens": 0}
        self._seconds = 0.0
        self._server_metrics: dict[str, float] = {}
        self._refreshing: Future[None] | None = None
        self._lock = threading.Lock()  # a turn's tokens: written by the loop, read by `partial`
        self._ended: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-rollout", daemon=True)
        self._pool = ServerPool(server_urls, servers, stall_timeout, patience)
        self._room = asyncio.Semaphore(max_requests)
        self._thread.start()
        try:
            self._call(self._pool.connect(max_model_len, sender is not None))
        except BaseException:
            self.shutdown()
            raise

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        return bool(self._under_way)

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt and return its session id. ValueError if it leaves no room to generate."""
        check_supported(params)
        tokens = checked_prompt(token_ids, self._vocab_size, self.max_model_len)
        load = Counter(session.server for session in self._sessions.values())
        session = _RemoteSession(self._next_id, [], server=self._pool.least_loaded(load, self._rank))
        self._next_id += 1
        self._sessions[session.session_id] = session
        self._begin_turn(session, tokens, params)
        return session.session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens to a session whose turn ended, and sample its next turn."""
        session = self._session(session_id)
        if session_id in self._under_way:
            raise ValueError(f"session {session_id} has a turn under way; resume it when that has ended")
        check_supported(params)
        self._begin_turn(session, checked_tokens(token_ids, self._vocab_size), params)

    def close(self, session_id: int) -> None:
        """End a session in whatever state it is; its server drops its request."""
        session = self._session(session_id)
        del self._sessions[session_id]
        self._under_way.discard(session_id)
        self._loop.call_soon_threadsafe(_cancel, session)

    def step(self) -> list[Completion]:
        """The turns that ended since the last call; waits a moment when there are none.

        RuntimeError when no server is left, or one answers what can't be understood.
        """
        if not self._under_way:
            return []
        if not self._has_weights:
            raise RuntimeError("the servers have no complete weights; call load_weights first")
        start = time.perf_counter()
        completions: list[Completion] = []
        wait = _STEP_SECONDS
        while self._failure is None:
            try:
                item = self._ended.get(timeout=wait) if wait else self._ended.get_nowait()
            except queue.Empty:
                break
            wait = 0.0
            if isinstance(item, BaseException):
                self._failure = item
            elif item.session_id in self._under_way:
                self._under_way.remove(item.session_id)
                completions.append(item)
        self._counts["steps"] += 1
        self._seconds += time.perf_counter() - start
        if self._failure is not None and not completions:
            raise EngineUnavailable(f"rollout on vLLM servers: {self._failure}") from self._failure
        return completions

    def partial(self, session_id: int) -> Partial:
        """What a session's present turn has sampled so far; nothing while no turn is under way."""
        session = self._session(session_id)
        with self._lock:
            return session.partial() if session_id in self._under_way else Partial([], [], None)

    # ---- weights and memory ----

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take (Hugging Face name, full tensor) pairs of the whole model as weights `version`.

        Turns under way stop, the servers take the weights, the turns go on from their tokens. A server that
        fails is not used any more; RuntimeError if none is left. Where several processes share the servers,
        all of them call this, walking `weights` together.
        """
        self._has_weights = False
        self._call(self._break_off())
        if self._sender is None:
            for _ in weights:
                pass  # gathered by all processes together: the sender needs this one to walk them too
            self._call(self._pool.wait_for_version(version, self._update_timeout))
        else:
            self._call(self._pool.pause())
            workers = [
                ServerWorkers(
                    client.url, self._pool.num_workers[client.url], functools.partial(self._rpc, client)
                )
                for client in self._pool.living()
            ]
            for url, reason in self._sender.send(workers, weights, version).items():
                self._pool.bury(url, reason)
            self._call(self._pool.finish_update(version))
        self.version = version
        self._has_weights = True
        self._go_on()

    def sleep(self, level: int = 1) -> int:
        """Nothing to give back: the servers' memory is not on the trainer's devices."""
        return 0

    def wake(self) -> None:
        """Nothing to take back."""

    def stats(self) -> dict[str, float]:
        """As in `RolloutEngine.stats`, and `servers`: how many live.

        What the servers count is of all processes that share them, and only the sender's engine reports it.
        While turns are under way, a busy server is not waited for: its figures are those of a moment ago.
        """
        with self._lock:
            turns = [self._sessions[session_id] for session_id in self._under_way]
            running = sum(1 for session in turns if session.token_ids)
        metrics = {
            **{name: float(count) for name, count in self._counts.items()},
            "running": float(running),
            "queued": float(len(turns) - running),
            "parked": float(len(self._sessions) - len(turns)),
            "servers": float(sum(client.dead is None for client in self._pool.clients)),
            "weight_version": float(self.version),
            "seconds": self._seconds,
        }
        if self._sender is not None:
            if not self._under_way:
                self._server_metrics = self._call(self._pool.metrics())
            elif self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)
        return metrics | self._server_metrics

    async def _refresh(self) -> None:
        self._server_metrics = await self._pool.metrics()

    def shutdown(self) -> None:
        """End requests, thread, transfer groups, and the servers that were started for this engine."""
        if self._loop.is_closed():
            return
        with ExitStack() as stack:  # from below: each is done whatever the one before comes to
            if self._servers is not None:
                stack.callback(self._servers.close)
            if self._sender is not None:
                stack.callback(self._sender.close)
            stack.callback(self._loop.close)
            stack.callback(self._thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            if self._refreshing is not None:
                self._refreshing.cancel()
            self._call(self._break_off())
            self._call(self._pool.close())

    # ---- turns ----

    def _begin_turn(self, session: _RemoteSession, tokens: list[int], params: SamplingParams) -> None:
        session.begin_turn(tokens, params, self.max_model_len)
        self._under_way.add(session.session_id)
        if session.limit < 1:  # an observation that fills the session up
            self._ended.put(session.end_turn("length", None, self.version))
        elif self._has_weights:
            self._loop.call_soon_threadsafe(self._start, session)

    def _go_on(self) -> None:
        """Start the turns that are under way, from the tokens that they have."""
        for session_id in self._under_way:
            self._loop.call_soon_threadsafe(self._start, self._sessions[session_id])

    def _start(self, session: _RemoteSession) -> None:
        if session.under_way and session.task is None and session.session_id in self._sessions:
            session.task = self._loop.create_task(self._run(session))

    async def _break_off(self) -> None:
        """End all requests; the turns keep the tokens that came."""
        tasks = []
        for session in list(self._sessions.values()):
            if session.task is not None:
                tasks.append(session.task)
                _cancel(session)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, session: _RemoteSession) -> None:
        """Request after request until the turn has ended; its completion, or an error, goes to the owner."""
        version, failures, turn = self.version, 0, session.turn

        def ended() -> bool:
            return session.turn != turn or not session.under_way

        try:
            while not ended():
                had = len(session.token_ids)
                if session.server.dead is not None:
                    load = Counter(other.server for other in list(self._sessions.values()))
                    session.server = self._pool.least_loaded(load, self._rank)
                server = session.server
                try:
                    async with self._room:
                        reason = await self._request(session, version)
                    if ended():
                        return
                    if reason == "abort":  # another process has paused the server
                        version = await self._pool.version_after_pause(server)
                    elif len(session.token_ids) == had:
                        raise RequestRefused(f"it ended a request with {reason!r} and without a token")
                except ServerFailed as error:
                    failures = 1 if len(session.token_ids) > had else failures + 1
                    await self._after_failure(session, error, failures)
        except RequestRefused as error:
            self._ended.put(RuntimeError(f"vLLM server {session.server.url}: {error}"))
        except Exception as error:  # whatever it is, the owner must hear of it: nobody awaits this task
            self._ended.put(error)
        finally:
            if session.task is asyncio.current_task():
                session.task = None
                if session.turn != turn:  # its next turn began before this request was gone
                    self._start(session)

    async def _request(self, session: _RemoteSession, version: int) -> str | None:
        """One request from the session's tokens; returns why the server ended it, if it did.

        A turn that ends is handed out at once: the task may be cancelled whenever it waits.
        """
        assert session.params is not None
        left = session.limit - len(session.token_ids)
        body = completion_body(
            self._pool.model_name, session.context, session.params, left, self._stream_interval
        )
        reason = None
        chunks = session.server.complete(body)
        try:
            async for chunk in chunks:
                if not all(0 <= token_id < self._vocab_size for token_id in chunk.token_ids):
                    raise RequestRefused(
                        f"it sent {chunk.token_ids}; the model has {self._vocab_size} tokens"
                    )
                with self._lock:
                    for token in zip(chunk.token_ids, chunk.log_probs, chunk.model_log_probs, strict=True):
                        if session.version_first is None:
                            session.version_first = version
                        self._counts["generated_tokens"] += 1
                        ended = session.accept(*token)
                        if ended is not None:
                            self._ended.put(session.end_turn(*ended, version))
                            return None
                reason = chunk.finish_reason or reason
        finally:
            await chunks.aclose()
        return reason

    async def _after_failure(self, session: _RemoteSession, error: ServerFailed, failures: int) -> None:
        """Return when it is worth another try, elsewhere if the server is dead."""
        await self._pool.check(session.server, error)
        if session.server.dead is not None:
            return
        if failures >= _FAILURES:
            raise RequestRefused(
                f"{failures} requests in a row failed, though it says it is healthy: {error}"
            )
        await asyncio.sleep(0.05 * 2**failures)

    # ---- small things ----

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _rpc(self, client: ServerClient, method: str, **arguments: str) -> Future[list[Any]]:
        """Call a method of `WeightReceiver` in a server's workers."""
        call = client.call_workers(method, RPC_SECONDS, **arguments)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _session(self, session_id: int) -> _RemoteSession:
        if session_id not in self._sessions:
            raise ValueError(f"no session {session_id}: it was closed")
        return self._sessions[session_id]


def _cancel(session: _RemoteSession) -> None:
    if session.task is not None:
        session.task.cancel()
        session.task = None
