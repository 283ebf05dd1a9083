"""A search engine on the web as a backend: cached, many queries at once, within one deadline for a batch.

queries -> AnswerCache -> EngineClient: rate limit, retries, deadline -> engine (engines.py)
        -> google without --snippet_only: the pages themselves (pages.py) -> Document('"Title"\\ntext')
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from search_r1.search.online.engines import (
    PAGE_SIZE,
    BadReply,
    Engine,
    GoogleSearch,
    JsonEngine,
    Page,
    SerpApi,
)
from search_r1.search.online.pages import NotFetched, best_text, fetch_page
from search_r1.search.replies import retry_after, without_surrogates
from search_r1.search.retriever import Document, RetrievalUnavailable, SearchResult

CONCURRENCY = 8  # requests under way; how many begin a second is for the rate to say
BAD_QUERY = (400, 404, 413, 414, 422)  # statuses about one query, not about the key or the account
FIRST_PAUSE, MAX_PAUSE = 0.5, 8.0  # seconds
MAX_RETRY_AFTER = 86_400.0  # seconds
MAX_REPLY_BYTES = 8 * 2**20
CONNECT_SECONDS = 10.0
USER_AGENT = "Mozilla/5.0 (compatible; search-r1-verl)"
HEADERS = {"User-Agent": USER_AGENT, "Accept": "application/json", "Accept-Encoding": "gzip"}
MAX_ENTRIES = 1_000_000  # answers in a file; the oldest go first
MAX_ENTRIES_IN_MEMORY = 10_000
SERPAPI_KEY, GOOGLE_KEY, GOOGLE_ID = "SERPAPI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CSE_ID"


class OnlineRetriever:
    """Searches the web. The score of a document is the engine's, or 1 / rank where it has none."""

    num_documents = None

    def __init__(
        self,
        engine: Engine,
        answers: AnswerCache,
        rate: float = 5.0,
        timeout: float = 20.0,
        read_pages: bool = False,
        allow_private_pages: bool = False,
    ) -> None:
        """`rate`: requests a second. `timeout`: seconds for a batch of queries. `read_pages`: take the text
        from the pages found, not from the engine's snippets; pages at private addresses only if allowed."""
        self.name = engine.name
        self._engine, self._answers, self._timeout = engine, answers, timeout
        self._client = EngineClient(engine.name, rate, engine.secrets)
        self._read_pages, self._allow_private = read_pages, allow_private_pages
        self._pages = httpx.Client(trust_env=False, verify=tls_settings(), headers={"User-Agent": USER_AGENT})
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=engine.name)
        self._page_threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="pages")

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """For each query at most `topk` pages. A query that the engine does not accept finds nothing.

        Raises RetrievalUnavailable when a query was not answered in time; the others' answers stay in the
        cache, so that the same batch gets further the next time.
        """
        deadline = time.monotonic() + self._timeout
        clean = [without_surrogates(query) for query in queries]
        searches = {
            query: self._threads.submit(self._search, query, topk, deadline) for query in dict.fromkeys(clean)
        }
        wait(searches.values())  # all of them: what is answered is kept, also when another one fails
        found = [searches[query].result() for query in clean]
        documents = [[Document.from_fields(page) for page in row] for row in found]
        return documents, [
            [page.get("score", 1.0 / rank) for rank, page in enumerate(row, start=1)] for row in found
        ]

    def describe(self) -> dict[str, Any]:
        url = self._engine.about.get("url", "").partition("?")[0]  # a key may be written behind it
        return {"backend": self.name, "read_pages": self._read_pages, "url": url}

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown(cancel_futures=True)
        self._page_threads.shutdown(cancel_futures=True)
        self._pages.close()
        self._answers.close()

    def _search(self, query: str, topk: int, deadline: float) -> list[Page]:
        if not query.strip():
            return []
        found: list[Page] = []
        for number in range(min(self._engine.max_pages, math.ceil(topk / PAGE_SIZE))):
            more = self._results(query, number, topk, deadline)
            found += more
            if len(found) >= topk or not more:
                break
        return found[:topk]

    def _results(self, query: str, number: int, topk: int, deadline: float) -> list[Page]:
        """One page of results, from the cache or the engine."""
        key = {"backend": self.name, "query": query, "page": number, "read_pages": self._read_pages}
        key |= self._engine.about | ({"topk": topk} if isinstance(self._engine, JsonEngine) else {})
        kept = self._answers.get(key)
        if kept is not None:
            return kept
        request = self._engine.request(query, number, topk)
        try:
            found = self._engine.parse(self._client.get_json(request, deadline))
        except RefusedByEngine as refusal:
            if refusal.status not in BAD_QUERY:
                raise
            print(f"no answer to the query {query[:80]!r}: {refusal}", file=sys.stderr)
            return []
        except BadReply as error:
            raise self._client.unavailable(str(error)) from None
        if self._read_pages:
            found = list(self._page_threads.map(lambda page: self._with_text(page, deadline), found))
        self._answers.put(key, found)
        return found

    def _with_text(self, page: Page, deadline: float) -> Page:
        """The same with the page's own text; as it is where the page can't be fetched."""
        snippet = page["contents"].partition("\n")[2]
        try:
            html = fetch_page(self._pages, page["url"], deadline, self._allow_private)
        except NotFetched as reason:
            return page | {"page": str(reason)}
        text = best_text(html, snippet)
        return page if text is None else page | {"contents": f'"{page["title"]}"\n{text}'}


class AnswerCache:
    """Answers of a search engine in an SQLite file, so that none is paid for twice.

    The key is a hash of the engine and its parameters, without any secret. Any number of threads may use it,
    and several processes one file.
    """

    def __init__(self, path: str | Path | None, max_age_days: float) -> None:
        """`path`: the file; None: in memory. Raises ValueError for a file that is no cache."""
        self._max_age = max_age_days * 86_400.0
        self._max_entries = MAX_ENTRIES if path else MAX_ENTRIES_IN_MEMORY
        self._lock = threading.Lock()
        columns = "key BLOB PRIMARY KEY, time REAL, value TEXT"
        try:
            self._database = sqlite3.connect(str(path or ":memory:"), timeout=10, check_same_thread=False)
            with self._database as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(f"CREATE TABLE IF NOT EXISTS answers ({columns})")
                database.execute("CREATE INDEX IF NOT EXISTS answers_by_time ON answers (time)")
        except sqlite3.Error as error:
            raise ValueError(f"--search_cache: can't use {path} ({error})") from None

    def get(self, parameters: dict[str, Any]) -> Any:
        """The value kept for these parameters, None when there is none or it is too old."""
        wanted = (_hash(parameters), time.time() - self._max_age)
        with self._lock:
            row = self._database.execute(
                "SELECT value FROM answers WHERE key = ? AND time >= ?", wanted
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, parameters: dict[str, Any], value: Any) -> None:
        """Keeps a value, and drops the oldest ones beyond the bound."""
        too_many = "SELECT key FROM answers ORDER BY time DESC LIMIT -1 OFFSET ?"
        with self._lock, self._database as database:
            entry = (_hash(parameters), time.time(), json.dumps(value))
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", entry)
            [count] = database.execute("SELECT COUNT(*) FROM answers").fetchone()
            if count > self._max_entries:
                database.execute(f"DELETE FROM answers WHERE key IN ({too_many})", (self._max_entries,))

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _hash(parameters: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode("ascii")).digest()


class RefusedByEngine(RetrievalUnavailable):
    """The engine refuses this request, and will again. `status`: the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TokenBucket:
    """At most `rate` takes a second, with up to a second's worth at once after a rest."""

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, max(1.0, rate)
        self._tokens, self._time = self._burst, time.monotonic()
        self._lock = threading.Lock()

    def reserve(self, latest: float) -> float | None:
        """Takes a token; how many seconds to wait before using it. None, nothing taken: after `latest`."""
        with self._lock:
            now = time.monotonic()
            self._tokens = min(self._burst, self._tokens + (now - self._time) * self._rate)
            self._time = now
            seconds = max(0.0, (1.0 - self._tokens) / self._rate)
            if now + seconds > latest:
                return None
            self._tokens -= 1.0
            return seconds

    def pause(self, seconds: float) -> None:
        """No token for so long: the engine said so."""
        with self._lock:
            self._tokens = min(self._tokens, 1.0 - seconds * self._rate)
            self._time = time.monotonic()


class EngineClient:
    """Asks one engine: at most so many requests a second, again after a fault, never past the deadline.

    429, 408, 5xx, no connection and no JSON are tried again, with growing pauses, as Retry-After says where
    it is there; any other 4xx is not. Keeps connections. Any number of threads may use it.
    """

    def __init__(self, name: str, rate: float, secrets: Iterable[str]) -> None:
        """`name`: for messages. `rate`: requests per second. `secrets`: never to be seen in a message."""
        self._name, self._rate = name, rate
        self._secrets = [secret for secret in secrets if secret]
        self._bucket = TokenBucket(rate)
        self._closed = threading.Event()
        self._jitter = random.Random()  # of its own: a retry must not move anybody's random numbers
        # Unlike the search server's address, an engine on the web may need the proxy of this network.
        self._http = httpx.Client(trust_env=True, follow_redirects=False, verify=tls_settings())
        logging.getLogger("httpx").addFilter(_hide_parameters)

    def get_json(self, request: httpx.Request, deadline: float) -> Any:
        """The decoded reply; `deadline`: time.monotonic() at which to give up.

        Raises RefusedByEngine for a 4xx that says no, RetrievalUnavailable when no good reply came in time.
        """
        pause, problem = FIRST_PAUSE, "no time was left"
        while True:
            seconds = self._bucket.reserve(deadline)
            if seconds is None:
                raise self.unavailable(f"{problem} (at most {self._rate:g} requests a second are allowed)")
            self._sleep(seconds)
            told_pause = None
            try:
                status, headers, content = self._send(request, deadline)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if 200 <= status < 300:
                    with contextlib.suppress(ValueError):
                        return json.loads(content)
                    problem = f"the reply is not JSON: {content[:80].decode(errors='replace')!r}"
                else:
                    problem = f"{status} {_error_text(content)}"
                    if status not in (408, 429) and status < 500:
                        raise RefusedByEngine(self._clean(problem), status)
                    told_pause = retry_after(headers)
            seconds = pause * self._jitter.uniform(0.5, 1.0)
            if told_pause is not None:
                seconds = max(seconds, min(told_pause, MAX_RETRY_AFTER))
                self._bucket.pause(seconds)
            if time.monotonic() + seconds > deadline:
                raise self.unavailable(problem)
            self._sleep(seconds)
            pause = min(2 * pause, MAX_PAUSE)

    def close(self) -> None:
        self._closed.set()
        self._http.close()

    def unavailable(self, problem: str) -> RetrievalUnavailable:
        """The error to raise; no secret is in it."""
        return RetrievalUnavailable(self._clean(problem))

    def _send(self, request: httpx.Request, deadline: float) -> tuple[int, httpx.Headers, bytes]:
        """One try. httpx bounds each wait for bytes; the deadline bounds all of them together."""
        left = max(0.001, deadline - time.monotonic())
        request.extensions["timeout"] = httpx.Timeout(left, connect=min(left, CONNECT_SECONDS)).as_dict()
        for name, value in HEADERS.items():
            request.headers.setdefault(name, value)
        response = self._http.send(request, stream=True)
        content = bytearray()
        with contextlib.closing(response):
            for chunk in response.iter_bytes():
                content += chunk
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the reply did not end in time")
                if len(content) > MAX_REPLY_BYTES:
                    raise httpx.ReadError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
        return response.status_code, response.headers, bytes(content)

    def _sleep(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise self.unavailable("the search was closed")

    def _clean(self, problem: str) -> str:
        for secret in self._secrets:
            problem = problem.replace(secret, "***")
        return f"{self._name}: {problem}"


@cache
def tls_settings() -> Any:
    """Certificates are checked; reading the list of authorities takes a tenth of a second, once."""
    return httpx.create_ssl_context()


def _error_text(content: bytes) -> str:
    """What the engine says is wrong: `error` (SerpAPI), `error.message` (Google), else the body's start."""
    try:
        fields = json.loads(content)
    except ValueError:
        return content[:200].decode(errors="replace").strip()
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


def _hide_parameters(record: logging.LogRecord) -> bool:
    """httpx logs whole addresses, and keys are part of them."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            str(value).split("?")[0] if isinstance(value, httpx.URL) else value for value in record.args
        )
    return True


def check_online_arguments(kind: str, arguments: argparse.Namespace) -> None:
    """Raises ValueError for flags of an online engine that can't work, and for missing keys."""
    for name in ("search_rate", "search_timeout", "search_cache_days"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}: found {value}, expected more than 0")
    if arguments.search_url and not arguments.search_url.startswith(("http://", "https://")):
        raise ValueError(f"--search_url: found {arguments.search_url!r}, expected http(s)://...")
    if arguments.search_cache and not Path(arguments.search_cache).absolute().parent.is_dir():
        raise ValueError(
            f"--search_cache: there is no folder {Path(arguments.search_cache).absolute().parent}"
        )
    _engine(kind, arguments)


def open_online(
    kind: str, arguments: argparse.Namespace, report: Callable[[str], None] = print
) -> OnlineRetriever:
    """The backend `kind` (serpapi, google, json) as the flags describe it."""
    if kind == "serpapi" and arguments.serp_api_key:
        report(f"--serp_api_key can be read by everybody on this machine; better set {SERPAPI_KEY}")
    return OnlineRetriever(
        _engine(kind, arguments),
        AnswerCache(arguments.search_cache, arguments.search_cache_days),
        rate=arguments.search_rate,
        timeout=arguments.search_timeout,
        read_pages=kind == "google" and not arguments.snippet_only,
        allow_private_pages=arguments.allow_private_pages,
    )


def _engine(kind: str, arguments: argparse.Namespace) -> Engine:
    if kind == "serpapi":
        key = arguments.serp_api_key or _key(SERPAPI_KEY)
        return SerpApi(key, arguments.serp_engine, arguments.search_url)
    if kind == "google":
        return GoogleSearch(_key(GOOGLE_KEY), arguments.cse_id or _key(GOOGLE_ID), arguments.search_url)
    if not arguments.search_template:
        raise ValueError(
            "--search_template is missing: a file that describes the engine of --retriever_name json"
        )
    return JsonEngine.read(arguments.search_template, arguments.search_url)


def _key(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise ValueError(f"the environment lacks {name}: export {name}=... before the server is started")
    return value
