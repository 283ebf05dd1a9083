"""Micro-batching: the queries of all open requests go to the backend together, each distinct one once.

    submit(queries, topk) -> Ticket, its future ends when every query has its QueryAnswer
        cache hit: at once
        equal query waiting or searched right now: joins it
        else: waits in the lane of its topk --(worker thread: next batch)--> batch_search -> cache, tickets

**When a batch leaves.** A batch leaves as soon as the backend is free. A lone request never waits, and while
the backend searches, queries pile up and go together. There is one exception. Clients that have just been
answered are about to ask again, and leaving with the first of them alone would cost an expensive backend a
whole pass. So the batch is held until three quarters of the queries that were open when the last batch ended
are there again. It is held no longer than `max_wait_ms`, and no longer than half the time that a batch takes.
For a lone client it is not held at all, because three quarters of one is none.

**Who goes into it.** Up to `max_batch` queries of one topk, in turns of SHARE per request, so that one
question doesn't wait behind a request of ten thousand. Requests with another topk are next in turn.

**What is bounded.** The queries and documents of all open requests are bounded, and past that `submit`
refuses. A request past its deadline, or given up by its client, leaves the queue. Its queries are not
searched unless somebody else waits for them.

Everything but `batch_search` itself runs on the event loop. The lock guards only what the worker takes from.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import orjson

from search_r1.search.launch import BatchSettings
from search_r1.search.search_backend import Document, RetrievalUnavailable, SearchBackend
from search_r1.search.serving.metrics import Metrics

RETURNING = 0.75  # a held batch leaves when this share of the queries that were open is there again
SHARE = 32  # queries of one request before it is the next one's turn
MAX_CACHE_BYTES = 256 * 2**20
MAX_OPEN_DOCUMENTS = 500_000  # the documents that all open requests ask for, about a kilobyte each
MAX_FAILED_CALLS = 16  # failed calls for one batch; one bad query among 16,384 is found in 15
RETRY_SECONDS = 1  # the time until a refused client should ask again
SWEEP_SECONDS = 0.1
SLOW_SECONDS = 0.25  # from here on it pays to know whether the client is still there

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """A refusal to serve a request.

    Attributes:
        status: The HTTP status, 4xx or 5xx.
        detail: The reason, as text for people.
        retry_after: Seconds, for 503.
    """

    def __init__(self, status: int, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """The answer to one query, ready to be written: its documents' JSON, best first, and their scores."""

    documents: tuple[bytes, ...]
    scores: tuple[bytes, ...]

    @classmethod
    def of(cls, documents: Sequence[Document], scores: Sequence[float]) -> QueryAnswer:
        """Return the hits in what a backend returns.

        A score that JSON has no number for (nan, inf) becomes null. Raises ValueError unless there is one
        score for each document.
        """
        if len(documents) != len(scores):
            raise ValueError(f"the backend gave {len(documents)} documents with {len(scores)} scores")
        written = orjson.dumps(list(scores), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        return cls(tuple([document.json for document in documents]), tuple(written) if documents else ())

    def write(self, return_scores: bool) -> bytes:
        """Return the JSON list of this query in the reply."""
        if not return_scores:
            return b"[%b]" % b",".join(self.documents)
        pairs = zip(self.documents, self.scores, strict=True)
        return b"[%b]" % b",".join([b'{"document":%b,"score":%b}' % pair for pair in pairs])


class ResultCache:
    """A cache (query, topk) -> QueryAnswer, bounded by entries and by bytes.

    The least recently used entry is dropped first.

    A larger topk does not answer a smaller one. Approximate indexes, rerankers and fusion may order the first
    documents differently when asked for more.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[str, int], QueryAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, query: str, topk: int) -> QueryAnswer | None:
        hits = self._entries.get((query, topk))
        if hits is not None:
            self._entries.move_to_end((query, topk))
        return hits

    def put(self, query: str, topk: int, hits: QueryAnswer) -> None:
        def num_bytes(query: str, hits: QueryAnswer) -> int:
            """Return about how many bytes an entry takes.

            The objects of a document take 80, and all others 600.
            """
            return 600 + 4 * len(query) + sum(map(len, hits.documents)) + 80 * len(hits.documents)

        if (query, topk) in self._entries:
            return
        self._entries[query, topk] = hits
        self.num_bytes += num_bytes(query, hits)
        while len(self._entries) > self.max_entries or self.num_bytes > MAX_CACHE_BYTES:
            (dropped, _), hits = self._entries.popitem(last=False)
            self.num_bytes -= num_bytes(dropped, hits)


@dataclass(eq=False, slots=True)
class _Query:
    """A distinct query that waits or is searched. `owner_ticket` is the ticket in whose turn it goes."""

    text: str
    topk: int
    owner_ticket: Ticket
    waiters: dict[Ticket, list[int]] = field(default_factory=dict)  # ticket -> positions of the query in it


@dataclass(eq=False, slots=True)
class Ticket:
    """One request in the queue. Its `future` ends (with None, or an error) when `hits` is complete."""

    topk: int
    arrived: float  # time.monotonic()
    hits: list[QueryAnswer | None]
    future: asyncio.Future[None]
    when_slow: Callable[[Ticket], None] | None = None
    num_queries: int = 0  # those that were not in the cache
    num_missing: int = 0  # those of them that have no hits yet
    queries: list[_Query] = field(default_factory=list)  # all that it waits for
    waiting: dict[_Query, None] = field(default_factory=dict)  # those that it owns and are not searched yet


class Batcher:
    """The queue in front of one backend. `submit` and `drop` are called on one event loop."""

    def __init__(self, retriever: SearchBackend, settings: BatchSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.cache = ResultCache(settings.cache_size)
        self.num_queries = self.num_documents = 0  # those of open requests
        self._retriever = retriever
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[tuple[str, int], _Query] = {}  # waiting, or searched right now
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()  # oldest first
        # Shared with the worker, under the lock:
        self._changed = threading.Condition()
        self._lanes: OrderedDict[int, OrderedDict[Ticket, None]] = OrderedDict()  # by topk
        self._num_waiting = 0  # queries in the lanes
        self._notify_at: float = 1  # the worker sleeps until this many wait
        self._expected = 0
        self._batch_seconds = 0.0  # the time that a batch takes, smoothed
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="search", daemon=True)

    def submit(
        self,
        queries: Sequence[str],
        topk: int,
        arrived: float,
        when_slow: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Ask for the answers to `queries`, in order.

        Args:
            queries: The queries of one request.
            topk: Documents per query.
            arrived: The time.monotonic() from which the request's time counts.
            when_slow: Is called once, with the ticket, if the request takes longer than SLOW_SECONDS.

        Returns:
            The ticket. Its future ends when all hits are there.

        Raises:
            Refusal: 503, if the queue is full.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._worker.start()
        ticket = Ticket(topk, arrived, [None] * len(queries), self._loop.create_future(), when_slow)
        missing = []
        for position, query in enumerate(queries):
            ticket.hits[position] = hits = self.cache.get(query, topk)
            if hits is None:
                missing.append(position)
        ticket.num_queries = ticket.num_missing = len(missing)
        self._metrics.queries.inc(len(queries))
        self._metrics.cache_hits.inc(len(queries) - len(missing))
        if not missing:
            ticket.future.set_result(None)
            return ticket
        if (
            self.num_queries + len(missing) > self.settings.max_queue
            or self.num_documents + len(missing) * topk > MAX_OPEN_DOCUMENTS
        ):
            self._metrics.refused.inc(len(queries))
            raise Refusal(503, f"the queue is full: {self.num_queries} queries are open", RETRY_SECONDS)
        self.num_queries += len(missing)
        self.num_documents += len(missing) * topk
        if not self._tickets:
            self._schedule_sweep()
        self._tickets[ticket] = None
        for position in missing:
            key = (queries[position], topk)
            open_query = self._open.get(key)
            if open_query is None:
                open_query = self._open[key] = _Query(*key, ticket)
                ticket.waiting[open_query] = None
            if ticket not in open_query.waiters:
                open_query.waiters[ticket] = []
                ticket.queries.append(open_query)
            open_query.waiters[ticket].append(position)
        if ticket.waiting:
            with self._changed:
                self._lanes.setdefault(topk, OrderedDict())[ticket] = None
                self._num_waiting += len(ticket.waiting)
                if self._num_waiting >= self._notify_at:
                    self._changed.notify()
        return ticket

    def drop(self, ticket: Ticket, error: Exception) -> None:
        """Take a ticket out, and end its future with `error`.

        A query that nobody else waits for is not searched. Nothing happens to a ticket that has ended.
        """
        if ticket not in self._tickets:
            return
        with self._changed:
            for query in ticket.queries:
                del query.waiters[ticket]
                owner = query.owner_ticket
                if query.waiters or query not in owner.waiting:
                    continue
                del self._open[query.text, query.topk], owner.waiting[query]
                self._num_waiting -= 1
                if not owner.waiting:
                    del self._lanes[owner.topk][owner]
                    if not self._lanes[owner.topk]:
                        del self._lanes[owner.topk]
        self._close_ticket(ticket)
        if not ticket.future.done():
            ticket.future.set_exception(error)

    def close(self, timeout: float) -> bool:
        """End the worker. Return False if the backend did not come back within `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._loop is not None:
            self._worker.join(timeout)
        return not self._worker.is_alive()

    # What follows runs on the event loop.

    def _close_ticket(self, ticket: Ticket) -> None:
        del self._tickets[ticket]
        self.num_queries -= ticket.num_queries
        self.num_documents -= ticket.num_queries * ticket.topk
        ticket.queries.clear()  # they refer to the ticket: a cycle would keep the documents

    def _deliver(
        self, queries: list[_Query], outcomes: list[QueryAnswer | Refusal], started: float, seconds: float
    ) -> None:
        """Give the outcome of each query to those who wait for it."""
        for query, outcome in zip(queries, outcomes, strict=True):
            del self._open[query.text, query.topk]
            if isinstance(outcome, Refusal):
                for ticket in list(query.waiters):
                    self.drop(ticket, outcome)
                continue
            self.cache.put(query.text, query.topk, outcome)
            for ticket, positions in query.waiters.items():
                for position in positions:
                    ticket.hits[position] = outcome
                ticket.num_missing -= len(positions)
                if ticket.num_missing == 0:
                    self._close_ticket(ticket)
                    if not ticket.future.done():
                        ticket.future.set_result(None)
        self._metrics.searched.inc(len(queries))
        self._metrics.batch_size.observe(len(queries))
        self._metrics.batch_seconds.observe(seconds)
        self._metrics.queue_seconds.observe(started - queries[0].owner_ticket.arrived)
        self._update_gauges()

    def _schedule_sweep(self) -> None:
        assert self._loop is not None
        self._loop.call_later(min(SWEEP_SECONDS, self.settings.request_timeout_s / 4), self._sweep)

    def _sweep(self) -> None:
        """End requests that are past their deadline, and look at slow ones."""
        now = time.monotonic()
        timeout = self.settings.request_timeout_s
        for ticket in list(self._tickets):
            age = now - ticket.arrived
            if age > timeout:
                self.drop(ticket, Refusal(504, f"no answer within {timeout:g} s"))
            elif age < SLOW_SECONDS:
                break
            elif ticket.when_slow is not None:
                when_slow = ticket.when_slow
                ticket.when_slow = None
                when_slow(ticket)
        self._update_gauges()
        if self._tickets:
            self._schedule_sweep()

    def _update_gauges(self) -> None:
        self._metrics.queue_queries.set(self.num_queries)
        self._metrics.open_requests.set(len(self._tickets))
        self._metrics.cache_entries.set(len(self.cache))
        self._metrics.cache_bytes.set(self.cache.num_bytes)

    # What follows runs in the worker thread.

    def _work(self) -> None:
        assert self._loop is not None
        while batch := self._next_batch():
            started = time.monotonic()
            outcomes = self._search([query.text for query in batch], batch[0].topk)
            seconds = time.monotonic() - started
            with self._changed:
                self._expected = len(batch) + self._num_waiting
                self._batch_seconds += 0.2 * (seconds - self._batch_seconds)
            try:
                self._loop.call_soon_threadsafe(self._deliver, batch, outcomes, started, seconds)
            except RuntimeError:  # the loop is closed: the server has stopped
                return

    def _next_batch(self) -> list[_Query]:
        """Wait until a batch may leave (see the module's docstring). Return [] if the batcher was closed."""
        with self._changed:
            while True:
                self._notify_at = 1
                self._changed.wait_for(lambda: self._num_waiting or self._closed)
                enough = min(int(self._expected * RETURNING), self.settings.max_batch)
                hold = min(self.settings.max_wait_ms / 1000, self._batch_seconds / 2)
                if self._num_waiting < enough and hold > 0 and not self._closed:
                    self._notify_at = enough
                    self._changed.wait(hold)
                self._notify_at = math.inf
                if self._closed:
                    return []
                if self._lanes:  # there is none if what was there has been dropped
                    return self._take_batch()

    def _take_batch(self) -> list[_Query]:
        """Take the next queries, all of one topk. The caller holds the lock."""
        batch: list[_Query] = []
        topk, lane = self._lanes.popitem(last=False)
        while lane and (room := self.settings.max_batch - len(batch)):
            ticket, _ = lane.popitem(last=False)
            next_queries = list(islice(ticket.waiting, min(room, SHARE)))
            for query in next_queries:
                del ticket.waiting[query]
            batch += next_queries
            if ticket.waiting:
                lane[ticket] = None
        if lane:
            self._lanes[topk] = lane
        self._num_waiting -= len(batch)
        return batch

    def _search(self, texts: list[str], topk: int) -> list[QueryAnswer | Refusal]:
        """Return the outcome of each query.

        A batch that fails is searched again in halves, so that a query that the backend chokes on fails
        alone.
        """
        failed = Refusal(500, "the search failed; the server's log says why")
        outcomes: list[QueryAnswer | Refusal] = [failed] * len(texts)
        ranges = [(0, len(texts))]
        num_failed = 0
        while ranges:
            start, stop = ranges.pop()
            try:
                documents, scores = self._retriever.batch_search(texts[start:stop], topk)
                if not len(documents) == len(scores) == stop - start:
                    raise ValueError(f"the backend gave {len(documents)} answers to {stop - start} queries")
                outcomes[start:stop] = [QueryAnswer.of(*row) for row in zip(documents, scores, strict=True)]
            except RetrievalUnavailable as error:
                unavailable = Refusal(503, f"the search engine is not available: {error}", RETRY_SECONDS)
                outcomes[start:stop] = [unavailable] * (stop - start)
            except BaseException as error:  # even a panic in Rust, as the thread must not end
                num_failed += 1
                if stop - start > 1 and num_failed < MAX_FAILED_CALLS:
                    middle = (start + stop) // 2
                    ranges += [(start, middle), (middle, stop)]
                else:
                    query = ascii(texts[start])[:100]
                    logger.error("search failed for %d queries, first %s: %r", stop - start, query, error)
        return outcomes
