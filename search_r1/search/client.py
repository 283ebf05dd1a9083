"""The search client: queries in, documents out, over Search-R1's `/retrieve` JSON.

    submit([query, ...]) -> one Future per query
        waiting queries --(all there are when a worker is free, each once)--> POST /retrieve --> Futures

A few worker threads send one request each. While they are busy new queries pile up and go together in the
next request, so batches grow with the load and nobody waits for a batch to fill. A request that fails for a
passing reason (no connection, timeout, 429, 5xx) is sent again, to the next address if there are several,
until the deadline of its queries. Answers are kept in a bounded cache: a run's index does not change.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypedDict
from urllib.parse import urlsplit, urlunsplit

import httpx

MAX_QUERY_CHARS = 2048  # the rest of a longer query is not sent: no search engine makes use of it
MAX_BATCH = 512  # queries in one request
NUM_WORKERS = 2  # requests in flight
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 2.0  # seconds; doubled at each try, times a random factor in 0.5..1


class FoundDocument(TypedDict):
    """A document as the agent sees it. `contents`: `"Title"` line, then text. `score`: None if not given."""

    contents: str
    score: float | None


class SearchError(RuntimeError):
    """A search got no usable answer until its deadline, or was refused. Says what the server said."""


@dataclass(eq=False)
class _Request:
    query: str
    topk: int
    deadline: float  # time.monotonic()
    future: Future[list[FoundDocument]] = field(default_factory=Future)


def parse_urls(urls: str | Sequence[str]) -> list[str]:
    """Addresses from one string with commas or a list; `/retrieve` is added to an address without a path."""
    parts = urls.split(",") if isinstance(urls, str) else list(urls)
    addresses = []
    for part in (part.strip() for part in parts):
        if not part:
            continue
        split = urlsplit(part)
        if split.scheme not in ("http", "https") or not split.netloc:
            raise ValueError(
                f"retriever url: found {part!r}, expected an address such as http://127.0.0.1:8000/retrieve "
                "(several are separated by commas)"
            )
        addresses.append(urlunsplit(split._replace(path="/retrieve")) if split.path in ("", "/") else part)
    if not addresses:
        raise ValueError("retriever url: found nothing, expected http://HOST:PORT/retrieve")
    return addresses


def parse_document(item: object) -> FoundDocument:
    """A document from what servers send: `{"document": ..., "score": s}`, the document alone, or a string."""
    score = None
    if isinstance(item, dict) and "document" in item:
        score, item = item.get("score"), item["document"]
    contents = item.get("contents") if isinstance(item, dict) else item
    if not isinstance(contents, str):
        found = f"fields {sorted(item)}" if isinstance(item, dict) else f"a {type(item).__name__}"
        raise SearchError(f"the search server's reply has a document without 'contents': found {found}")
    return {"contents": contents, "score": float(score) if isinstance(score, int | float) else None}


def parse_reply(reply: object, num_queries: int) -> list[list[FoundDocument]]:
    """One list of documents per query from the JSON of `/retrieve`. Raises SearchError if it is not that."""
    result = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(result, list) or not all(isinstance(documents, list) for documents in result):
        raise SearchError("the search server's reply has no 'result' list of lists: is this /retrieve?")
    if len(result) != num_queries:
        raise SearchError(f"the search server's reply has {len(result)} lists for {num_queries} queries")
    return [[parse_document(item) for item in documents] for documents in result]


class SearchClient:
    """Talks to one or several retrieval servers. Threads start at the first search and end with `close`."""

    def __init__(
        self, urls: str | Sequence[str], topk: int = 3, timeout: float = 60.0, cache_size: int = 10_000
    ) -> None:
        """`urls`: see `parse_urls`. `timeout`: seconds from `submit` until a search has failed, retries
        included. `cache_size`: answers kept in memory, 0 for none."""
        if topk < 1:
            raise ValueError(f"retriever.topk: found {topk}, expected at least 1")
        if timeout <= 0:
            raise ValueError(f"retriever.timeout: found {timeout}, expected more than 0 seconds")
        self.urls = parse_urls(urls)
        self.topk, self.timeout = topk, timeout
        self.num_requests = 0  # HTTP requests answered so far
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, int], list[FoundDocument]] = OrderedDict()
        self._in_flight: dict[tuple[str, int], _Request] = {}  # waiting or sent, by (query, topk)
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._jitter = random.Random()  # of its own: a retry must not move anybody's random numbers
        self._http = httpx.Client(trust_env=False, follow_redirects=True)

    def submit(self, queries: Sequence[str], topk: int | None = None) -> list[Future[list[FoundDocument]]]:
        """Starts searches and returns at once: one Future per query, in order, that ends in its documents or
        in a SearchError. Equal queries share one search (and the deadline of the first)."""
        topk = self.topk if topk is None else topk
        deadline = time.monotonic() + self.timeout
        futures = []
        with self._changed:
            if self._closed.is_set():
                raise RuntimeError("the search client is closed")
            for query in queries:
                key = (query.encode("utf-8", "replace").decode()[:MAX_QUERY_CHARS], topk)
                futures.append(self._cached(key) or self._enqueue(key, deadline))
            self._changed.notify()
        self._start_threads()
        return futures

    def batch_search(self, queries: Sequence[str], topk: int | None = None) -> list[list[FoundDocument]]:
        """The documents of each query; waits for them. Raises SearchError if one search failed."""
        return [future.result() for future in self.submit(queries, topk)]

    def close(self) -> None:
        """Ends the threads; searches that still wait fail. Waits at most two seconds for a server."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        give_up = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        with self._changed:
            abandoned = list(self._in_flight.values())
        self._finish(abandoned, error=SearchError("the search client was closed"))
        self._http.close()

    def __enter__(self) -> SearchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cached(self, key: tuple[str, int]) -> Future[list[FoundDocument]] | None:
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        future: Future[list[FoundDocument]] = Future()
        future.set_result(self._cache[key])
        return future

    def _enqueue(self, key: tuple[str, int], deadline: float) -> Future[list[FoundDocument]]:
        if key not in self._in_flight:
            request = _Request(*key, deadline)
            self._in_flight[key] = request
            self._waiting.append(request)
        return self._in_flight[key].future

    def _start_threads(self) -> None:
        while len(self._threads) < NUM_WORKERS:
            name = f"search-client-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while batch := self._take():
            try:
                self._search(batch)
            except Exception as error:  # whatever it is, the waiting trajectories must hear of it
                self._finish(batch, error=SearchError(f"search failed: {error!r}"))

    def _take(self) -> list[_Request]:
        """The requests to send next (all with one topk); empty when the client was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
            if self._closed.is_set():
                return []
            batch = [self._waiting.popleft()]
            while self._waiting and self._waiting[0].topk == batch[0].topk and len(batch) < MAX_BATCH:
                batch.append(self._waiting.popleft())
            if self._waiting:
                self._changed.notify()
            return batch

    def _search(self, batch: list[_Request]) -> None:
        """Sends one batch until it is answered, refused, or past its deadline."""
        backoff, url_number, problem = FIRST_BACKOFF, 0, "every request before it took too long"
        while batch := self._drop_expired(batch, problem):
            left = min(request.deadline for request in batch) - time.monotonic()
            url = self.urls[url_number % len(self.urls)]
            try:
                response = self._post(url, batch, timeout=max(left, 0.001))
            except httpx.TransportError as error:
                problem = f"{url}: {str(error) or type(error).__name__}"
            else:
                if response.is_success:
                    self._answer(batch, response, url)
                    return
                problem = f"{url} answered {response.status_code}: {_error_text(response)}"
                if response.status_code < 500 and response.status_code not in (408, 429):
                    self._refused(batch, problem)
                    return
            url_number += 1
            if url_number % len(self.urls) == 0:  # every address was tried: give them a moment
                left = min(request.deadline for request in batch) - time.monotonic()
                self._closed.wait(min(backoff * self._jitter.uniform(0.5, 1.0), max(0.0, left)))
                backoff = min(2 * backoff, MAX_BACKOFF)

    def _drop_expired(self, batch: list[_Request], problem: str) -> list[_Request]:
        """The requests that still have time; the others fail because of `problem`."""
        now = time.monotonic()
        expired = [request for request in batch if request.deadline <= now]
        if expired:
            self._finish(expired, error=SearchError(f"no answer within {self.timeout:g} s ({problem})"))
        if self._closed.is_set():
            return []
        return [request for request in batch if request.deadline > now]

    def _post(self, url: str, batch: list[_Request], timeout: float) -> httpx.Response:
        """One try; `timeout` is for all of it (httpx's own bounds each wait for bytes)."""
        queries = [request.query for request in batch]
        body = {"queries": queries, "topk": batch[0].topk, "return_scores": True}
        # With a second address to turn to, one that hangs must not eat the whole deadline.
        timeout /= len(self.urls)
        give_up = time.monotonic() + timeout
        content = bytearray()
        with self._http.stream("POST", url, json=body, timeout=timeout) as response:
            for chunk in response.iter_bytes():
                content += chunk
                if time.monotonic() > give_up:
                    raise httpx.ReadTimeout("the reply did not end in time")
        return httpx.Response(response.status_code, content=bytes(content))

    def _answer(self, batch: list[_Request], response: httpx.Response, url: str) -> None:
        try:
            results = parse_reply(response.json(), len(batch))
        except (SearchError, ValueError) as error:
            self._finish(batch, error=SearchError(f"{url}: {error}"))
            return
        with self._changed:
            self.num_requests += 1
        self._finish(batch, results)

    def _refused(self, batch: list[_Request], problem: str) -> None:
        """A 4xx is about the request itself: find the query it is about, so that the others are answered."""
        if len(batch) == 1:
            self._finish(batch, error=SearchError(problem))
            return
        middle = len(batch) // 2
        self._search(batch[:middle])
        self._search(batch[middle:])

    def _finish(
        self,
        batch: list[_Request],
        results: list[list[FoundDocument]] | None = None,
        error: SearchError | None = None,
    ) -> None:
        with self._changed:
            for number, request in enumerate(batch):
                key = (request.query, request.topk)
                self._in_flight.pop(key, None)
                if results is not None and self._cache_size > 0:
                    self._cache[key] = results[number]
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
        for number, request in enumerate(batch):  # outside the lock: a Future runs its callbacks here
            with contextlib.suppress(InvalidStateError):  # `close` had given it up
                if results is not None:
                    request.future.set_result(results[number])
                else:
                    request.future.set_exception(error)


def _error_text(response: httpx.Response) -> str:
    """What the server says is wrong: FastAPI's `detail` if it is there, else the start of the body."""
    try:
        reply = response.json()
    except ValueError:
        return response.text[:200].strip() or "no text"
    detail = reply.get("detail", reply) if isinstance(reply, dict) else reply
    return str(detail)[:200]
