"""Rollouts on servers that run already: `RolloutEngine` (verl/sessions/engine_contract.py) over HTTP.

    owner's thread:  open, resume, close, step, load_weights
                          |  turns             ^  turns that ended (a queue)
    event loop thread:    v                    |
                     a task per turn -> POST /inference/v1/generate -> tokens -> stop strings, eos
                                        at the same server for all turns of a session

The servers are those of `python -m verl.inference`, or vLLM's, with our worker extension or without. They
have no sessions for us. A session here is its token ids. Each turn is a request with all of them, sent to the
same server, whose prefix cache makes the next turn cheap. What ends a turn is decided here, on the tokens as
they arrive, and what a server sent beyond is dropped. So a turn can be broken off at any token and go on,
there or at another server, from the tokens that it has: that is how it lives through the end of a server and,
on vLLM, through new weights. The random numbers of a token depend on the session's seed and on how many
tokens were drawn with it alone (`sampler.py`), so such a break changes nothing. (Plain vLLM draws its own.)

verl.inference takes weights between two of its steps, so its turns go on meanwhile. It says the version of
each token, and its turns arrive as a whole.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from verl.sessions.engine_contract import (
    Completion,
    EngineUnavailable,
    Partial,
    RolloutEngine,
    RolloutSession,
    SamplingParams,
)
from verl.workers.rollout.remote.client import (
    Chunk,
    Kind,
    RequestRefused,
    ServerClient,
    ServerFailed,
    ServerPool,
    samples_plainly,
)
from verl.workers.rollout.remote.weights import ServerWorkers, WeightSender, weights_in_folder
from verl.workers.rollout.vllm import check_supported

T = TypeVar("T")

_STEP_SECONDS = 0.02  # how long `step` waits for a turn to end
_FAILURES = 5  # requests of a turn that fail in a row, without a token, though the server says it is healthy


@dataclass(eq=False)
class RemoteSession(RolloutSession):
    """A session.

    Attributes:
        server: The server that the session is at.
        task: The task that runs its turn, in the loop's thread.
    """

    server: ServerClient | None = None
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None


class RemoteEngine(RolloutEngine[RemoteSession]):
    """The `RolloutEngine` on servers that run already.

    Several engines, one in each training process, may share the servers. Each runs its own sessions, and
    sends the weights, which all of them have at the same time, to servers of its own.

    An engine whose servers take no weights has the version 0 at once: the servers have weights of their own.
    """

    session_class = RemoteSession

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        max_model_len: int,
        vocab_size: int,
        sender: WeightSender,
        weight_dir: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        max_requests: int = 1024,
    ) -> None:
        """Connect to the servers.

        Args:
            server_urls: Base addresses, "http://host:port".
            max_model_len: Number of tokens that the servers must allow in a sequence.
            vocab_size: All token ids are smaller than this.
            sender: Brings new weights to vLLM's servers, to this process's share of them.
            weight_dir: The folder in which verl.inference finds new weights. None means the system's folder
                of temporary files, which servers of other machines don't see.
            rank: The rank of this process among those that share the servers, which are all of
                torch.distributed's. They begin with different servers.
            world_size: Number of these processes.
            max_requests: Maximum number of requests in flight.

        Raises:
            ValueError: If there is no address, or a server does not fit.
            EngineUnavailable: If a server does not answer.
        """
        if not server_urls:
            raise ValueError("rollout.remote.urls is empty; name=remote needs at least one server")
        super().__init__(max_model_len, vocab_size)
        self._sender = sender
        self._weight_dir = weight_dir
        self._rank = rank
        self._world_size = world_size
        self._under_way: set[int] = set()  # sessions whose present turn `step` has not returned yet
        self._failure: BaseException | None = None
        self._server_metrics: dict[str, float] = {}
        self._lock = threading.Lock()  # a turn's tokens: written by the loop, read by `partial`
        self._ended: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-rollout", daemon=True)
        self._pool = ServerPool(server_urls)
        self._room = asyncio.Semaphore(max_requests)
        self._thread.start()
        try:
            self._call(self._pool.connect(max_model_len))
        except BaseException:
            self.shutdown()
            raise
        if all(client.no_weights for client in self._pool.clients):
            self.version = 0

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        return bool(self._under_way or self._without_room)

    def _check_params(self, params: SamplingParams) -> None:
        check_supported(params)
        if self._pool.kind is Kind.PLAIN and not samples_plainly(params):
            raise ValueError(
                f"{params}: of these only a temperature of 0 or 1 without top_p, top_k and min_p has "
                "log-probs from plain vLLM; start the servers with our worker extension (docs/rollout.md)"
            )

    def _queue(self, session: RemoteSession) -> None:
        if session.server is None:
            session.server = self._least_loaded()
        self._under_way.add(session.session_id)
        if self.version >= 0:
            self._loop.call_soon_threadsafe(self._start, session)

    def _drop(self, session: RemoteSession) -> None:
        self._under_way.discard(session.session_id)
        self._loop.call_soon_threadsafe(session.cancel)

    def partial(self, session_id: int) -> Partial:
        with self._lock:
            return super().partial(session_id)

    def _advance(self) -> list[Completion]:
        """Return the turns that ended since the last call. Wait a moment if there are none.

        Raises EngineUnavailable when no server is left, or one answers what can't be understood.
        """
        completions: list[Completion] = []
        while self._failure is None:
            try:
                item = self._ended.get(timeout=0.0 if completions or self._without_room else _STEP_SECONDS)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                self._failure = item
            elif item.session_id in self._under_way:
                self._under_way.remove(item.session_id)
                completions.append(item)
        if self._failure is not None and not completions:
            raise EngineUnavailable(f"rollout on servers: {self._failure}") from self._failure
        return completions

    # ---- weights and memory ----

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights in the servers.

        On vLLM the turns under way stop before and go on after it. A server that fails is not used any more,
        by any process. Where several processes share the servers, all of them call this, walking `weights`
        together.

        Raises:
            ValueError: If a server takes no weights.
            EngineUnavailable: If no server is left.
        """
        self._pool.check_takes_weights()
        self.version = -1
        if self._pool.kind is Kind.VERL:
            self._load_from_folder(weights, version)
        else:
            self._send_to_workers(weights, version)
        self.version = version
        for session_id in self._under_way:
            self._loop.call_soon_threadsafe(self._start, self._sessions[session_id])

    def _load_from_folder(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights to a folder, in the first process, and let all servers read it."""
        with ExitStack() as files:
            folder = Path()
            if self._rank == 0:
                folder = files.enter_context(weights_in_folder(weights, self._weight_dir))
            else:
                for _ in weights:  # gathered by all processes together
                    pass
            self._by_the_first(partial(self._pool.read_folder, folder, version))

    def _send_to_workers(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Stop the turns under way, and send the weights to the workers of vLLM's servers."""
        self._call(self._break_off())
        self._by_the_first(self._pool.pause)
        share = self._pool.clients[self._rank :: self._world_size]
        clients = {client.url: client for client in share if client.dead is None}
        workers = [
            ServerWorkers(url, client.num_workers, partial(self._call_workers, client))
            for url, client in clients.items()
        ]
        for url, reason in self._sender.send(workers, weights, version).items():
            clients[url].bury(reason)
        self._by_the_first(partial(self._pool.finish_update, version))

    def _by_the_first(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a call on all servers in one process, while the others wait.

        Every process raises the errors of that one. Raises EngineUnavailable if no server is left.
        """
        self._agree()
        problem: Exception | None = None
        if self._rank == 0:
            try:
                self._call(action())
            except Exception as error:  # the others would wait for ever
                problem = error
        self._agree(problem)

    def _agree(self, problem: Exception | None = None) -> None:
        """Wait for all processes, and tell each which servers any of them has seen fail."""
        told: list[Any] = [(problem, {client.url: client.dead for client in self._pool.clients})]
        if self._world_size > 1:
            own = told[0]
            told = [None] * self._world_size
            dist.all_gather_object(told, own)
        for problem, dead in told:
            for client in self._pool.clients:
                if dead[client.url] is not None:
                    client.bury(dead[client.url])
            if problem is not None:
                raise problem
        self._pool.living()

    def stats(self) -> dict[str, float]:
        """Return the figures of `RolloutEngine.stats`, and `servers`, the number of living ones.

        What the servers count is of all processes that share them, and only the first one's engine reports
        it. While turns are under way, it is as it was before them.
        """
        with self._lock:
            turns = [self._sessions[session_id] for session_id in self._under_way]
            running = sum(1 for session in turns if session.log_probs)
        if self._rank == 0 and not turns:
            self._server_metrics = self._call(self._pool.metrics())
        now = {
            "running": float(running),
            "queued": float(len(turns) - running),
            "parked": float(len(self._sessions) - len(turns)),
            "servers": float(sum(client.dead is None for client in self._pool.clients)),
        }
        return super().stats() | now | self._server_metrics

    def shutdown(self) -> None:
        """End requests, thread and transfer groups. The servers run on."""
        if self._loop.is_closed():
            return
        with ExitStack() as stack:  # from below: each is done whatever the one before comes to
            stack.callback(self._sender.close)
            stack.callback(self._loop.close)
            stack.callback(self._thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._call(self._break_off())
            for client in self._pool.clients:
                self._call(client.disconnect())
            self._call(self._loop.shutdown_asyncgens())  # answers that were not read to their end

    # ---- turns ----

    def _start(self, session: RemoteSession) -> None:
        if session.limit < 1:  # no room for a token: `step` ends the turn
            return
        if session.under_way and session.task is None and session.session_id in self._sessions:
            session.task = self._loop.create_task(self._run(session))

    async def _break_off(self) -> None:
        """End all requests; the turns keep the tokens that came."""
        tasks = []
        for session in list(self._sessions.values()):
            if session.task is not None:
                tasks.append(session.task)
                session.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, session: RemoteSession) -> None:
        """Make requests until the turn has ended. Its completion, or an error, goes to the owner."""
        version = self.version
        failures = 0
        turn = session.turn
        server: ServerClient | None = None
        try:
            while session.turn == turn and session.under_way:
                had = len(session.log_probs)
                server = session.server
                if server is None or server.dead is not None:
                    server = session.server = self._least_loaded()
                try:
                    async with self._room:
                        reason = await self._request(session, server, version)
                    if reason is None:  # the turn has ended; the owner may have resumed the session by now
                        return
                    if len(session.log_probs) == had:
                        raise RequestRefused(f"it ended a request with {reason!r} and without a token")
                except ServerFailed as error:
                    failures = 1 if len(session.log_probs) > had else failures + 1
                    await self._pool.check(server, error)
                    if server.dead is None and failures >= _FAILURES:
                        raise RequestRefused(
                            f"{failures} requests in a row failed, though it says it is healthy: {error}"
                        ) from error
                    if server.dead is None:
                        await asyncio.sleep(0.05 * 2**failures)
        except RequestRefused as error:
            self._ended.put(RuntimeError(f"server {server.url if server else ''}: {error}"))
        except Exception as error:  # whatever it is, the owner must hear of it: nobody awaits this task
            self._ended.put(error)
        finally:
            if session.task is asyncio.current_task():
                session.task = None
                if session.turn != turn:  # its next turn began before this request was gone
                    self._start(session)

    async def _request(self, session: RemoteSession, server: ServerClient, version: int) -> str | None:
        """Make a request from the session's tokens.

        A turn that ends is handed out at once, because the task may be cancelled whenever it waits.

        Returns:
            The reason why the server ended the request, or None if the turn has ended.
        """
        left = session.limit - len(session.log_probs)
        reason: str | None = None
        chunks = server.generate(session, left)
        try:
            async for chunk in chunks:
                if not all(0 <= token_id < self.vocab_size for token_id in chunk.token_ids):
                    raise RequestRefused(f"it sent {chunk.token_ids}; the model has {self.vocab_size} tokens")
                with self._lock:
                    for token_id, log_prob, model_log_prob, token_version in self._tokens(
                        session, chunk, version
                    ):
                        self._generated_tokens += 1
                        ended = session.accept(token_id, log_prob, model_log_prob, token_version)
                        if ended is not None:
                            self._ended.put(session.end_turn(*ended, token_version))
                            return None
                reason = chunk.finish_reason or reason
        finally:
            await chunks.aclose()
        return reason

    def _tokens(
        self, session: RemoteSession, chunk: Chunk, version: int
    ) -> Iterator[tuple[int, float, float, int]]:
        """Yield id, both log-probs and version of each token of a chunk.

        A model's log-prob that nobody knows is NaN.
        """
        model_log_probs = chunk.model_log_probs
        if model_log_probs is None:
            is_plain = samples_plainly(session.params)
            model_log_probs = chunk.log_probs if is_plain else [math.nan] * len(chunk.log_probs)
        versions = chunk.versions or [version] * len(chunk.token_ids)
        yield from zip(chunk.token_ids, chunk.log_probs, model_log_probs, versions, strict=True)

    def _least_loaded(self) -> ServerClient:
        """Return the living server with the fewest sessions.

        Of equals it is the first from this process's own place on.
        """
        load = Counter(other.server for other in list(self._sessions.values()) if other.server)
        living = self._pool.living()
        own = self._rank % len(living)
        return min(living[own:] + living[:own], key=lambda client: load[client])

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _call_workers(self, client: ServerClient, method: str, **arguments: str) -> Future[list[Any]]:
        """Call a method of `WeightReceiver` in a server's workers."""
        call = client.call_workers(method, **arguments)
        return asyncio.run_coroutine_threadsafe(call, self._loop)
