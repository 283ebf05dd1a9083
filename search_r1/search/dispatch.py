"""Decide which query of the search client travels in which request, to which address, and which goes again.

    accept --equal query under way?--> joins it, with a deadline of its own
       |
       +--> waiting --(all that wait, when an address has room)--> POST /retrieve --> callers' Futures
               ^------ no answer, 5xx, 429, nonsense: elsewhere, until the deadline ----+

All this happens in the client's thread. While requests are out, new queries pile up, to go together in the
next one. So batches grow with the load, and nobody waits for a batch to fill.

A request without an answer for a share of the deadline is left open, and its queries are sent once more. The
first answer counts. An address that fails is left alone for a while: 0.1 s, doubled up to 2 s, or what
Retry-After says. Then one query sees whether it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit, urlunsplit

import httpx

from search_r1.search.replies import (
    FoundDocument,
    SearchError,
    error_text,
    parse_reply,
    reason_of,
    retry_after,
    wants_single_query,
)

MAX_BATCH = 512  # queries in one request
MIN_SHARE = 32  # fewer waiting queries are not dealt out over several addresses
MAX_REPLY_BYTES = 256 * 2**20
SLOTS = 2  # requests that one address gets at a time: while it works on one, the next is on its way
SINGLE_QUERY_SLOTS = 16  # the same for an address that takes a single query in each request
# Pauses, in seconds, of an address that fails or of a query that breaks its requests.
FIRST_PAUSE = 0.1
MAX_PAUSE = 2.0
MAX_TOLD_PAUSE = 60.0  # seconds; a longer Retry-After of a server is cut to this
# Another address is asked after USUAL_TIMES times the usual seconds, and after MIN_PATIENCE seconds at least.
MIN_PATIENCE = 1.0
USUAL_TIMES = 10.0

Key: TypeAlias = tuple[str, int]  # query, topk
Documents: TypeAlias = list[FoundDocument]
STATISTICS = {
    "shared": 0,  # searches whose query was under way already
    "failed": 0,  # searches that ended in a SearchError
    "failovers": 0,  # searches that another address answered than was asked first
    "requests": 0,  # HTTP requests that brought an answer
    "request_seconds": 0.0,  # the seconds that these took, added up
    "failed_requests": 0,  # HTTP requests that brought none, or none in time
}


@dataclass(eq=False)
class _Address:
    """One server. It is up while `num_failures` is 0. Otherwise `problem` says what is wrong."""

    url: str
    in_flight: int = 0
    num_failures: int = 0  # failures since its last answer
    paused_until: float = 0.0
    last_used: float = 0.0
    problem: str = ""
    is_unreachable: bool = False  # its last request found no connection
    takes_single_query: bool = False  # as SkyRL's server does

    @property
    def name(self) -> str:
        """Return the address for messages, without user and password."""
        split = urlsplit(self.url)
        return urlunsplit(split._replace(netloc=split.netloc.rpartition("@")[2]))

    @property
    def has_room(self) -> bool:
        return self.in_flight < (SINGLE_QUERY_SLOTS if self.takes_single_query else SLOTS)

    def revive(self) -> None:  # it answered
        self.num_failures = 0
        self.paused_until = 0.0
        self.problem = ""
        self.is_unreachable = False


@dataclass(eq=False)
class _Search:
    """A query under way, for one caller or several."""

    key: Key
    futures: list[Future[Documents]] = field(default_factory=list)
    requests: list[_Request] = field(default_factory=list)  # those that carry it now
    first_address: _Address | None = None
    nonsense_from: set[_Address] = field(default_factory=set)
    limit: int = MAX_BATCH  # the largest batch it may travel in, since one that fails is sent again in parts
    num_broken: int = 0  # requests that failed with it in a way that may be its own fault
    problem: str = ""  # why its last failed request failed
    is_done: bool = False


@dataclass(eq=False)
class _Request:
    """One HTTP request under way.

    `is_single` says that it is in the words of a server that takes one query a request.
    """

    address: _Address
    searches: list[_Search]
    is_single: bool
    started: float
    is_overdue: bool = False  # nothing came for long, so its queries are sent once more
    timer: asyncio.TimerHandle = field(init=False)
    task: asyncio.Task[tuple[httpx.Response, bytes]] = field(init=False)


class Dispatcher:
    """The searches and requests of one client, in one asyncio loop, on its clock (time.monotonic)."""

    def __init__(
        self, urls: list[str], http: httpx.AsyncClient, timeout: float, keep: Callable[[Key, Documents], None]
    ) -> None:
        """Create a dispatcher.

        Args:
            urls: The addresses of the servers.
            http: The client that sends requests.
            timeout: Seconds that a search may take.
            keep: Is told every answer.
        """
        self.addresses = [_Address(url) for url in urls]
        self.timeout = timeout
        self.statistics: dict[str, float] = dict(STATISTICS)
        self._http = http
        self._keep = keep
        self._open: dict[Key, _Search] = {}
        self._waiting: OrderedDict[_Search, None] = OrderedDict()  # to be sent, in this order
        self._wake: asyncio.TimerHandle | None = None
        self._usual_seconds: float | None = None  # the usual seconds of a request, smoothed
        self._jitter = random.Random()  # its own, so that a retry does not move anybody's random numbers

    def accept(self, new: Sequence[tuple[Key, Future[Documents]]], submitted: float) -> None:
        """Take searches in. Their deadlines count from `submitted`."""
        for key, future in new:
            search = self._open.get(key)
            if search is None:
                search = self._open[key] = _Search(key)
                self._waiting[search] = None
            else:
                self.statistics["shared"] += 1
            search.futures.append(future)
            _running_loop().call_at(submitted + self.timeout, self._expire, search, future)
        self._dispatch()

    async def close(self) -> None:
        """Fail what is open. The end of the loop ends the requests."""
        for search in list(self._open.values()):
            self._finish(search, SearchError("the search client was closed"))
        await self._http.aclose()

    def _expire(self, search: _Search, future: Future[Documents]) -> None:
        """Tell a caller whose time is over what is wrong with each address."""
        if search.is_done:
            return
        missing = "connection" if all(address.is_unreachable for address in self.addresses) else "answer"
        problems = [a.problem or search.problem or f"{a.name}: no answer" for a in self.addresses]
        error = SearchError(f"no {missing} within {self.timeout:g} s ({'; '.join(dict.fromkeys(problems))})")
        search.futures.remove(future)
        self._end(future, error)
        if not search.futures:
            self._finish(search, error)

    def _finish(self, search: _Search, outcome: Documents | SearchError) -> None:
        """End a search for all its callers, and the requests that nobody waits for any more."""
        if search.is_done:
            return
        search.is_done = True
        self._open.pop(search.key, None)
        self._waiting.pop(search, None)
        if not isinstance(outcome, SearchError):
            self._keep(search.key, outcome)
        for future in search.futures:
            self._end(future, outcome)
        for request in search.requests:
            if all(other.is_done for other in request.searches):
                request.task.cancel()

    def _end(self, future: Future[Documents], outcome: Documents | SearchError) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller cancelled it
            if isinstance(outcome, SearchError):
                self.statistics["failed"] += 1
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    # ---- sending requests

    def _dispatch(self) -> None:
        """Send what waits to the addresses that have room."""
        now = _running_loop().time()
        up = [address for address in self.addresses if not address.num_failures]
        share = max(MIN_SHARE, -(-len(self._waiting) // max(1, len(up))))
        down = [address for address in self.addresses if address.num_failures and not address.in_flight]
        due = [address for address in down if now >= address.paused_until]
        if up:  # one query to each address that is due sees whether it is back
            for address in due[: len(self._waiting)]:
                self._start(address, self._take_batch(1))
        while self._waiting:
            free = [server for server in up or due if (server.has_room if up else not server.in_flight)]
            if not free:
                break
            address = min(free, key=lambda each: (each.num_failures, each.in_flight, each.last_used))
            self._start(address, self._take_batch(1 if address.takes_single_query else min(MAX_BATCH, share)))
        if self._wake is not None:
            self._wake.cancel()
        pauses = [address.paused_until for address in down if not address.in_flight]
        if self._waiting and pauses and not up:
            self._wake = _running_loop().call_at(max(now, min(pauses)), self._dispatch)

    def _take_batch(self, limit: int) -> list[_Search]:
        """Take the searches that go next, at most `limit`, all with one topk."""
        batch: list[_Search] = []
        for search in self._waiting:
            limit = min(limit, search.limit)
            if batch and (len(batch) >= limit or search.key[1] != batch[0].key[1]):
                break
            batch.append(search)
        for search in batch:
            del self._waiting[search]
        return batch

    def _start(self, address: _Address, batch: list[_Search]) -> None:
        address.in_flight += 1
        address.last_used = time.monotonic()
        request = _Request(
            address, batch, address.takes_single_query and len(batch) == 1, _running_loop().time()
        )
        for search in batch:
            search.requests.append(request)
            search.first_address = search.first_address or address
        patience = self.timeout / (len(self.addresses) + 1)
        if len(self.addresses) > 1 and self._usual_seconds is not None:
            patience = min(patience, max(MIN_PATIENCE, USUAL_TIMES * self._usual_seconds))
        request.timer = _running_loop().call_later(patience, self._resend_overdue, request)
        request.task = _running_loop().create_task(self._post(request))
        request.task.add_done_callback(lambda task: self._on_request_done(request, task))

    async def _post(self, request: _Request) -> tuple[httpx.Response, bytes]:
        queries = [search.key[0] for search in request.searches]
        topk = request.searches[0].key[1]
        fields: dict[str, object] = {"queries": queries, "topk": topk, "return_scores": True}
        if request.is_single:
            fields["query"] = queries[0]  # beside `queries`, because another server may be there by now
        url = request.address.url
        content = json.dumps(fields).encode("ascii")
        headers = {"Content-Type": "application/json"}
        body = bytearray()
        async with self._http.stream("POST", url, content=content, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise httpx.DecodingError(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
        return response, bytes(body)

    def _resend_overdue(self, request: _Request) -> None:
        """Send the queries of a request once more because nothing came for long. The request stays open."""
        seconds = _running_loop().time() - request.started
        request.is_overdue = True
        request.address.in_flight -= 1
        self._pause_address(request, f"{request.address.name}: no answer for {seconds:.1f} s")
        copies = max(2, len(self.addresses))
        self._requeue([search for search in request.searches if len(search.requests) < copies])

    # ---- what came back

    def _on_request_done(self, request: _Request, task: asyncio.Task[tuple[httpx.Response, bytes]]) -> None:
        address = request.address
        searches = request.searches
        request.timer.cancel()
        if not request.is_overdue:
            address.in_flight -= 1
        for search in searches:
            search.requests.remove(request)
        try:
            response, body = task.result()
            results = parse_reply(body, len(searches)) if response.is_success else []
        except asyncio.CancelledError:
            pass  # nobody waits for it any more
        except httpx.TransportError as error:
            self._pause_address(request, f"{address.name}: {reason_of(error)}")
            address.is_unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            # If there was a connection, a query may have brought the server down.
            self._requeue(searches, in_parts=not address.is_unreachable)
        except Exception as error:  # another error of httpx, or our own mistake: the callers must hear of it
            reason = error if isinstance(error, SearchError) else reason_of(error)
            self._reject_reply(request, searches, f"{address.name}: {reason}")
        else:
            if response.is_success:
                self._answered(request, results)
            else:
                self._refused(request, response, body)
        self._dispatch()

    def _refused(self, request: _Request, response: httpx.Response, body: bytes) -> None:
        address = request.address
        searches = request.searches
        status = response.status_code
        problem = f"{address.name} answered {status}: {error_text(body)}"
        if status >= 500 or status in (408, 429):
            self._pause_address(request, problem, retry_after(response.headers))
            self._requeue(searches, in_parts=status in (500, 501, 503))
            return
        address.revive()
        if not request.is_single and wants_single_query(status, body):
            address.takes_single_query = True
            self._requeue(searches)
        elif status in (400, 413, 422) and len(searches) > 1:  # one of them is at fault, the others go on
            self._requeue(searches, in_parts=True)
        else:
            for search in searches:
                self._finish(search, SearchError(problem))

    def _answered(self, request: _Request, results: list[Documents | SearchError]) -> None:
        seconds = _running_loop().time() - request.started
        self.statistics["requests"] += 1
        self.statistics["request_seconds"] += seconds
        self._usual_seconds = 0.8 * (self._usual_seconds or seconds) + 0.2 * seconds
        request.address.revive()
        for search, result in zip(request.searches, results, strict=True):
            if isinstance(result, SearchError):
                self._reject_reply(request, [search], f"{request.address.name}: {result}")
            elif not search.is_done:
                self.statistics["failovers"] += search.first_address is not request.address
                self._finish(search, result)

    def _reject_reply(self, request: _Request, searches: list[_Search], problem: str) -> None:
        """Blame an address for a reply without sense. A search fails when every address gave such a reply."""
        self._pause_address(request, problem)
        for search in searches:
            search.nonsense_from.add(request.address)
            if len(search.nonsense_from) == len(self.addresses):
                self._finish(search, SearchError(problem))
        self._requeue(searches)

    def _pause_address(self, request: _Request, problem: str, told_pause: float | None = None) -> None:
        """Leave an address alone for a while, for `told_pause` seconds at least."""
        self.statistics["failed_requests"] += 1
        now = _running_loop().time()
        address = request.address
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(address.num_failures, 10))
        pause *= self._jitter.uniform(0.5, 1.0)
        if told_pause is not None:  # never earlier, and not with everybody else at the same moment
            pause = max(pause, min(told_pause, MAX_TOLD_PAUSE) * self._jitter.uniform(1.0, 1.1))
        address.num_failures += 1
        address.paused_until = max(address.paused_until, now + pause)
        address.problem = problem
        address.is_unreachable = False
        address.takes_single_query = False  # another server may come up there
        for search in request.searches:
            search.problem = problem

    def _requeue(self, searches: list[_Search], in_parts: bool = False, at_the_end: bool = False) -> None:
        """Let searches wait again, in front, but for those that another request carries.

        With `in_parts` they go in batches of half the size, so that a query that breaks its request ends up
        alone. Then it goes behind the others.
        """
        if in_parts:
            for search in searches:
                search.limit = min(search.limit, -(-len(searches) // 2))
                search.num_broken += 1
            rounds = max(search.num_broken for search in searches) // len(self.addresses)
            if len(searches) == 1 and rounds:
                pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(rounds, 10))
                _running_loop().call_later(pause, self._requeue, searches, False, True)
                return
        for search in reversed(searches):
            if not search.is_done and all(request.is_overdue for request in search.requests):
                self._waiting[search] = None
                self._waiting.move_to_end(search, last=at_the_end)
        self._dispatch()


_running_loop = asyncio.get_running_loop
