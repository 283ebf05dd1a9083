"""What the search client's thread does: which query travels in which request, to which server, and again.

    accept --equal query under way?--> joins it, with a deadline of its own
       |
       +--> waiting --(all that wait, when an address has a free slot)--> POST /retrieve --> callers' Futures
               ^------ no answer, 5xx, 429, garbage: elsewhere, until the deadline -----+

While requests are out new queries pile up, to go together in the next one: batches grow with the load and
nobody waits for a batch to fill. A request without an answer for a share of the deadline is left open and its
queries are sent once more; the first answer counts. Health and load of the servers: addresses.py.
Everything here runs in one asyncio loop, on its clock (time.monotonic).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeAlias

import httpx

from search_r1.search.transport.addresses import Address, AddressBook
from search_r1.search.transport.replies import (
    FoundDocument,
    SearchError,
    error_text,
    parse_reply,
    retry_after,
)

MAX_BATCH = 512  # queries in one request
MIN_SHARE = 32  # fewer waiting queries than this are not dealt out over several addresses
MAX_REPLY_BYTES = 256 * 2**20
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 2.0  # seconds a query waits after it broke a request at every address
MIN_PATIENCE, USUAL_TIMES = 1.0, 10.0  # another address is asked after 10 times the usual seconds, 1 at least
LAST_TRY = 1.0  # seconds for a search that comes when no server has answered for a whole deadline

Key: TypeAlias = tuple[str, int]  # query, topk
Documents: TypeAlias = list[FoundDocument]


@dataclass
class Statistics:
    """Counters of a client since it was made."""

    shared: int = 0  # searches whose query was under way already
    failed: int = 0  # searches that ended in a SearchError
    failovers: int = 0  # searches that were answered by another address than was asked first
    requests: int = 0  # HTTP requests that brought an answer
    request_seconds: float = 0.0  # these took, added up
    failed_requests: int = 0  # HTTP requests that brought none, or none in time


@dataclass(eq=False)
class _Caller:
    """One who waits for a search."""

    future: Future[Documents]
    seconds: float  # that the search may take
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Search:
    """A query under way, for one caller or several."""

    key: Key
    callers: list[_Caller] = field(default_factory=list)
    requests: list[_Request] = field(default_factory=list)  # that carry it now
    first_address: Address | None = None
    garbage_from: set[Address] = field(default_factory=set)
    limit: int = MAX_BATCH  # the largest batch it may travel in: one that fails is sent again in parts
    num_broken: int = 0  # requests that failed with it in a way that may be its own fault
    problem: str = ""  # of its last request
    is_done: bool = False


@dataclass(eq=False)
class _Request:
    """One HTTP request. A probe sees whether an address is back; its query is also sent to another one."""

    address: Address
    searches: list[_Search]
    started: float
    is_probe: bool
    is_overdue: bool = False
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Dispatcher:
    """The searches and requests of one client."""

    def __init__(
        self,
        addresses: AddressBook,
        http: httpx.AsyncClient,
        timeout: float,
        on_found: Callable[[Key, Documents], None],
    ) -> None:
        """`timeout`: seconds that a search may take. `on_found` is told every answer."""
        self.addresses, self.timeout, self.statistics = addresses, timeout, Statistics()
        self._http, self._on_found = http, on_found
        self._open: dict[Key, _Search] = {}
        self._waiting: OrderedDict[_Search, None] = OrderedDict()  # to be sent, in this order
        self._requests: set[_Request] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._usual_seconds: float | None = None  # of a request, smoothed
        self._last_answer = 0.0  # when it came
        self._silent_since: float | None = None  # begin of the first request that failed after it
        self._unreached: set[Address] = set()  # those whose last request found no connection

    # ---- searches

    def accept(self, asked: Sequence[tuple[Key, Future[Documents]]], asked_at: float) -> None:
        """Takes searches in. Their deadlines count from `asked_at`."""
        seconds = self.timeout
        if self._silent_since is not None and asked_at - self._silent_since >= self.timeout:
            seconds = min(seconds, LAST_TRY)
        for key, future in asked:
            search = self._open.get(key)
            if search is None:
                search = self._open[key] = _Search(key)
                self._waiting[search] = None
            else:
                self.statistics.shared += 1
            caller = _Caller(future, seconds)
            search.callers.append(caller)
            caller.timer = _loop().call_at(asked_at + seconds, self._expire, search, caller)
        self._dispatch()

    async def close(self) -> None:
        """Ends all requests; open searches fail."""
        for search in list(self._open.values()):
            self._finish(search, SearchError("the search client was closed"))
        tasks = [request.task for request in self._requests if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expire(self, search: _Search, caller: _Caller) -> None:
        now = _loop().time()
        waits = {request.address: now - request.started for request in reversed(search.requests)}
        problems = [
            f"{address.name}: no answer for {waits[address]:.1f} s" if address in waits else address.problem
            for address in self.addresses.all
        ]
        names = ", ".join(address.name for address in self.addresses.all)
        said = "; ".join(filter(None, problems)) or search.problem or f"{names}: other searches came first"
        spent, what = f"{caller.seconds:g} s", "answer"
        if self._unreached.issuperset(self.addresses.all):
            what = "connection"
        if caller.seconds < self.timeout and self._silent_since is not None:
            spent += (
                f", nor {'to' if what == 'answer' else 'for'} any search for {now - self._silent_since:.0f} s"
            )
        error = SearchError(f"no {what} within {spent} ({said})")
        search.callers.remove(caller)
        self._tell(caller, error)
        if not search.callers:
            self._finish(search, error)

    def _finish(self, search: _Search, outcome: Documents | SearchError) -> None:
        """Ends a search for all its callers, and the requests that nobody waits for any more."""
        search.is_done = True
        self._open.pop(search.key, None)
        self._waiting.pop(search, None)
        if not isinstance(outcome, SearchError):
            self._on_found(search.key, outcome)
        for caller in search.callers:
            self._tell(caller, outcome)
        for request in search.requests:
            # While all servers are silent one may be back, and slow: its answer is waited for until overdue.
            if self._is_useless(request) and (request.is_overdue or self._silent_since is None):
                request.cancel()

    def _tell(self, caller: _Caller, outcome: Documents | SearchError) -> None:
        if caller.timer is not None:
            caller.timer.cancel()
        with contextlib.suppress(InvalidStateError):  # the caller cancelled it
            if isinstance(outcome, SearchError):
                self.statistics.failed += 1
                caller.future.set_exception(outcome)
            else:
                caller.future.set_result(outcome)

    # ---- requests

    def _dispatch(self) -> None:
        """Sends what waits to the addresses that have room."""
        now = _loop().time()
        if self._waiting:
            for address in self.addresses.to_probe(now):
                self._start(address, [next(iter(self._waiting))], is_probe=True)
        share = max(MIN_SHARE, -(-len(self._waiting) // max(1, self.addresses.num_up)))
        while self._waiting and (chosen := self.addresses.choose(now)) is not None:
            self._start(chosen, self._take_batch(min(MAX_BATCH, share)))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if self._waiting and (due := self.addresses.next_due(now)) is not None:
            self._wake = _loop().call_at(due, self._dispatch)

    def _take_batch(self, limit: int) -> list[_Search]:
        """The searches that go next, at most `limit`, all with one topk."""
        batch: list[_Search] = []
        for search in self._waiting:
            limit = min(limit, search.limit)
            if batch and (len(batch) >= limit or search.key[1] != batch[0].key[1]):
                break
            batch.append(search)
        for search in batch:
            del self._waiting[search]
        return batch

    def _start(self, address: Address, batch: list[_Search], is_probe: bool = False) -> None:
        self.addresses.started(address)
        request = _Request(address, batch, _loop().time(), is_probe)
        self._requests.add(request)
        if not is_probe:
            for search in batch:
                search.requests.append(request)
                search.first_address = search.first_address or address
        request.task = _loop().create_task(self._run(request))
        request.task.add_done_callback(lambda _: self._ended(request))  # also if it is cancelled unstarted

    async def _run(self, request: _Request) -> None:
        name = request.address.name
        overdue = _loop().call_later(self._patience(), self._overdue, request)
        try:
            try:
                response, body = await self._post(request)
            finally:
                overdue.cancel()
                self._ended(request)
            self._judge(request, response, body)
        except asyncio.CancelledError:
            pass  # nobody waits for it any more
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._failed(request, f"{name}: {_reason(error)}")
            self._unreached.add(request.address)
        except httpx.TransportError as error:  # a query may have brought the server down
            self._failed(request, f"{name}: {_reason(error)}", by_query=True)
        except Exception as error:  # other kinds of httpx, or a mistake of ours: the callers must hear of it
            self._garbage(request, request.searches, f"{name}: {_reason(error)}")
        self._dispatch()

    async def _post(self, request: _Request) -> tuple[httpx.Response, bytes]:
        fields = {
            "queries": [search.key[0] for search in request.searches],
            "topk": request.searches[0].key[1],
            "return_scores": True,
        }
        content, headers = json.dumps(fields).encode("ascii"), {"Content-Type": "application/json"}
        body = bytearray()
        async with self._http.stream(
            "POST", request.address.url, content=content, headers=headers
        ) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise httpx.DecodingError(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
        return response, bytes(body)

    @staticmethod
    def _is_useless(request: _Request) -> bool:
        """Whether nobody waits for its answer."""
        return all(search.is_done for search in request.searches)

    def _ended(self, request: _Request) -> None:
        if request not in self._requests:
            return
        self._requests.remove(request)
        if not request.is_overdue:
            request.address.in_flight -= 1
        if not request.is_probe:
            for search in request.searches:
                search.requests.remove(request)

    def _patience(self) -> float:
        """Seconds until a request is overdue."""
        share = self.timeout / (len(self.addresses.all) + 1)
        if len(self.addresses.all) == 1 or self._usual_seconds is None:
            return share
        return min(share, max(MIN_PATIENCE, USUAL_TIMES * self._usual_seconds))

    def _overdue(self, request: _Request) -> None:
        """Nothing came for long: the queries go out once more, while this request stays open."""
        seconds = _loop().time() - request.started
        request.is_overdue = True
        request.address.in_flight -= 1
        self._mark(request, f"{request.address.name}: no answer for {seconds:.1f} s")
        if request.is_probe or self._is_useless(request):
            request.cancel()
        else:
            copies = max(2, len(self.addresses.all))
            self._again([search for search in request.searches if len(search.requests) < copies])
            self._dispatch()

    # ---- what came back

    def _judge(self, request: _Request, response: httpx.Response, body: bytes) -> None:
        status, name = response.status_code, request.address.name
        if response.is_success:
            try:
                results = parse_reply(body, len(request.searches))
            except SearchError as error:
                self._garbage(request, request.searches, f"{name}: {error}")
            else:
                self._answered(request, results)
            return
        problem = f"{name} answered {status}: {error_text(body)}"
        if status >= 500 or status in (408, 429):
            self._failed(request, problem, retry_after(response.headers), by_query=status in (500, 501, 503))
        else:
            self._refused(request, problem, by_query=status in (400, 413, 422))

    def _answered(self, request: _Request, results: list[Documents | SearchError]) -> None:
        seconds = _loop().time() - request.started
        self.statistics.requests += 1
        self.statistics.request_seconds += seconds
        usual = seconds if self._usual_seconds is None else self._usual_seconds
        self._usual_seconds = 0.8 * usual + 0.2 * seconds
        self._alive(request)
        for search, result in zip(request.searches, results, strict=True):
            if search.is_done:
                continue
            if isinstance(result, SearchError):
                self._garbage(request, [search], f"{request.address.name}: {result}")
                continue
            self.statistics.failovers += search.first_address not in (None, request.address)
            self._finish(search, result)

    def _refused(self, request: _Request, problem: str, by_query: bool) -> None:
        """A 4xx. With `by_query` one of the queries is at fault: it is found, so that the others go on."""
        self._alive(request)
        if request.is_probe:
            return
        if by_query and len(request.searches) > 1:
            self._send_in_parts(request)
            return
        for search in request.searches:
            if not search.is_done:
                self._finish(search, SearchError(problem))

    def _failed(
        self, request: _Request, problem: str, told_pause: float | None = None, by_query: bool = False
    ) -> None:
        """No answer, for a reason that may pass. With `by_query` it may be a query, or too many."""
        self._mark(request, problem, told_pause)
        if request.is_probe:
            return
        if by_query:
            self._send_in_parts(request)
        else:
            self._again(request.searches)

    def _garbage(self, request: _Request, searches: list[_Search], problem: str) -> None:
        """A reply without sense: the fault of the address. A search fails when every address gave such."""
        self._mark(request, problem)
        if request.is_probe:
            return
        for search in searches:
            search.garbage_from.add(request.address)
            if len(search.garbage_from) == len(self.addresses.all) and not search.is_done:
                self._finish(search, SearchError(problem))
        self._again(searches)

    def _mark(self, request: _Request, problem: str, told_pause: float | None = None) -> None:
        self.statistics.failed_requests += 1
        self.addresses.failed(request.address, _loop().time(), problem, told_pause)
        self._unreached.discard(request.address)
        if self._silent_since is None:
            self._silent_since = max(request.started, self._last_answer)
        for search in request.searches:
            search.problem = problem

    def _alive(self, request: _Request) -> None:
        request.address.answered()
        self._unreached.discard(request.address)
        self._silent_since, self._last_answer = None, _loop().time()

    def _send_in_parts(self, request: _Request) -> None:
        """Again in batches of half the size, so that a query that breaks its request ends up alone."""
        half = -(-len(request.searches) // 2)
        for search in request.searches:
            search.limit = min(search.limit, half)
            search.num_broken += 1
        rounds = max(search.num_broken for search in request.searches) // len(self.addresses.all)
        if len(request.searches) > 1 or rounds == 0:
            self._again(request.searches)
        else:  # every address had it alone, or nearly so: it must not keep the others away from them
            pause = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** min(rounds, 10))
            _loop().call_later(pause, self._again_at_the_end, request.searches)

    def _again(self, searches: list[_Search]) -> None:
        """Back to the front of those that wait, but for those that another request carries."""
        for search in reversed(searches):
            if not search.is_done and all(request.is_overdue for request in search.requests):
                self._waiting[search] = None
                self._waiting.move_to_end(search, last=False)

    def _again_at_the_end(self, searches: list[_Search]) -> None:
        for search in searches:
            if not search.is_done:
                self._waiting[search] = None
        self._dispatch()


_loop = asyncio.get_running_loop


def _most_telling(error: BaseException) -> BaseException | None:
    """Of several attempts, as to each address of a name (an ExceptionGroup of Python 3.11), one that was
    refused: there is such a machine. Else the last.
    """
    attempts = getattr(error, "exceptions", ())
    refused = (attempt for attempt in attempts if isinstance(attempt, ConnectionRefusedError))
    return next(refused, attempts[-1] if attempts else None)


def _reason(error: BaseException) -> str:
    """The text of the cause that lies deepest: "refused the connection" rather than "All attempts failed"."""
    while cause := error.__cause__ or error.__context__ or _most_telling(error):
        error = cause
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection"
    if isinstance(error, socket.gaierror):  # its numbers are no errno
        is_unknown = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return f"the host name {'is not known' if is_unknown else f'does not resolve ({error.strerror})'}"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno)
    said = str(error)
    return " ".join(said.split()) or type(error).__name__
