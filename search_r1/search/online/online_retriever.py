"""A search engine on the web as a backend: many queries at once, within one deadline for a batch.

    queries -> SerpAPI or Google's Custom Search: rate limit, retries -> Document('"Title"\\ntext')

The formats are SerpAPI's "Google Search Engine Results API" and cse.list of Google's Custom Search JSON API.
Both answer ten results a page. A query that wants more takes several pages.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from search_r1.search.replies import error_text, retry_after, without_surrogates
from search_r1.search.search_backend import Document, RetrievalUnavailable, SearchResult
from verl.utils.text import printable

CONCURRENCY = 8  # requests under way at once; the rate says how many may begin in a second
# Google answers no more than 100 results.
PAGE_SIZE = 10
MAX_PAGES = 10
BAD_QUERY = (400, 404, 413, 414, 422)  # statuses about one query, not about the key or the account
# The next four are in seconds.
FIRST_PAUSE = 0.5
MAX_PAUSE = 8.0
MAX_RETRY_AFTER = 3600.0
CONNECT_SECONDS = 10.0
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; search-r1-verl)", "Accept-Encoding": "gzip"}

Page = dict[str, Any]
"""A page that was found: `contents` (first line the title in quotation marks, then text), title, url, ..."""


class BadReply(ValueError):
    """A reply that is not what this engine sends. Asking again may help."""


@dataclass(frozen=True)
class SerpApi:
    """The engine SerpAPI: the answer box, then the organic results, then the related questions."""

    key: str
    engine: str
    url: str
    name: ClassVar[str] = "serpapi"

    def parameters(self, query: str, page: int) -> dict[str, str]:
        parameters = {"q": query, "api_key": self.key, "output": "json", "engine": self.engine}
        return parameters | ({"start": str(page * PAGE_SIZE)} if page else {})

    def parse(self, reply: Any) -> list[Page | None]:
        """Return what was found, best first.

        Raises BadReply.
        """
        if not isinstance(reply, dict):
            raise BadReply(f"found a JSON {type(reply).__name__}, expected an object")
        status = (reply.get("search_metadata") or {}).get("status")
        if "error" in reply and status != "Success":  # "no results" is an error with the status Success
            raise BadReply(str(reply["error"])[:200])
        box = reply.get("answer_box") or {}
        box = box[0] if isinstance(box, list) else box
        if not isinstance(box, dict):
            raise BadReply("answer_box: expected an object")
        texts = [box.get(name) for name in ("answer", "result", "snippet")]  # mostly one is filled
        text = "\n".join(str(text) for text in texts if isinstance(text, (str, int, float)))
        pages = [_page(box.get("title") or "Answer", text, box.get("link"), kind="answer_box")]
        for item in _items(reply, "organic_results"):
            pages.append(_page(item.get("title"), item.get("snippet"), item.get("link"), kind="organic"))
        for item in _items(reply, "related_questions"):
            answer = item.get("snippet") or item.get("answer")
            pages.append(_page(item.get("question"), answer, item.get("link"), kind="related_question"))
        return pages


@dataclass(frozen=True)
class GoogleSearch:
    """The engine of Google's Custom Search JSON API: titles and snippets."""

    key: str
    engine_id: str
    url: str
    name: ClassVar[str] = "google"

    def parameters(self, query: str, page: int) -> dict[str, str]:
        parameters = {"key": self.key, "cx": self.engine_id, "q": query, "num": str(PAGE_SIZE)}
        return parameters | ({"start": str(1 + page * PAGE_SIZE)} if page else {})

    def parse(self, reply: Any) -> list[Page | None]:
        """Return what was found, best first.

        Raises BadReply.
        """
        if not isinstance(reply, dict) or ("items" not in reply and "searchInformation" not in reply):
            raise BadReply("found neither items nor searchInformation in the reply")
        items = _items(reply, "items")
        return [_page(item.get("title"), item.get("snippet"), item.get("link")) for item in items]


def _items(reply: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = reply.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadReply(f"{name}: expected a list of objects")
    return items


def _page(title: Any, text: Any, url: Any, **more: Any) -> Page | None:
    """Return a result as a page, or None for a result without text."""
    if not isinstance(text, str) or not text.strip():
        return None
    title = " ".join(str(title or "").split())
    return {"contents": f'"{title}"\n{text.strip()}', "title": title, "url": str(url or ""), **more}


class OnlineRetriever:
    """A retriever that searches the web. The score of a document is 1 / rank.

    Any number of threads may use it.
    """

    num_documents = None

    def __init__(self, engine: SerpApi | GoogleSearch, rate: float = 5, timeout: float = 20) -> None:
        """Create the retriever.

        Args:
            engine: The search engine.
            rate: Requests a second.
            timeout: Seconds for a batch of queries.
        """
        self.name = engine.name
        self._engine = engine
        self._rate = rate
        self._timeout = timeout
        self._lock = threading.Lock()
        self._next_start = 0.0  # time.monotonic() from which the next request may start
        self._closed = threading.Event()
        self._jitter = random.Random()  # its own, so that a retry does not move anybody's random numbers
        # Unlike the search server's address, an engine on the web may need the proxy of this network.
        self._http = httpx.Client(trust_env=True, headers=HEADERS)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses, and keys are part of them
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=engine.name)

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return at most `topk` pages for each query.

        A query that the engine does not accept finds nothing. Raises RetrievalUnavailable if a query was not
        answered in time.
        """
        deadline = time.monotonic() + self._timeout
        clean = [without_surrogates(query) for query in queries]
        submit = self._threads.submit
        searches = {query: submit(self._search, query, topk, deadline) for query in dict.fromkeys(clean)}
        wait(searches.values())
        pages = [searches[query].result() for query in clean]
        documents = [[Document.from_fields(page) for page in row] for row in pages]
        return documents, [[1.0 / rank for rank in range(1, len(row) + 1)] for row in pages]

    def describe(self) -> dict[str, Any]:
        url = self._engine.url.partition("?")[0]  # a key may be written behind it
        return {"backend": self.name, "url": url}

    def close(self) -> None:
        self._closed.set()
        self._http.close()
        self._threads.shutdown(cancel_futures=True)

    def _search(self, query: str, topk: int, deadline: float) -> list[Page]:
        pages: list[Page] = []
        for number in range(min(MAX_PAGES, math.ceil(topk / PAGE_SIZE)) if query.strip() else 0):
            results = self._results(query, number, deadline)
            pages += results
            if len(pages) >= topk or not results:
                break
        return pages[:topk]

    def _results(self, query: str, number: int, deadline: float) -> list[Page]:
        """Return one page of results.

        429, 408, 5xx, no connection and nonsense are tried again, with growing pauses, or as Retry-After
        says. Any other 4xx is not. Raises RetrievalUnavailable.
        """
        pause = FIRST_PAUSE
        problem = "no time was left"
        while True:
            with self._lock:  # a second's requests may start at once after a rest
                start = max(self._next_start, time.monotonic() - 1.0)
                if start > deadline:
                    allowed = f"at most {self._rate:g} requests a second are allowed"
                    raise self._unavailable(f"{problem} ({allowed})")
                self._next_start = start + 1.0 / self._rate
            self._sleep(start - time.monotonic())
            remaining = max(0.001, deadline - time.monotonic())
            told_pause = None
            try:
                response = self._http.get(
                    self._engine.url,
                    params=self._engine.parameters(query, number),
                    timeout=httpx.Timeout(remaining, connect=min(remaining, CONNECT_SECONDS)),
                )
                if response.is_success:
                    return list(filter(None, self._engine.parse(response.json())))
                problem = f"{response.status_code} {error_text(response.content)}"
                told_pause = retry_after(response.headers)
                if response.status_code in BAD_QUERY:
                    print(
                        f"no answer to the query {query[:80]!r}: {printable(self._clean(problem))}",
                        file=sys.stderr,
                    )
                    return []
                if response.status_code not in (408, 429) and response.status_code < 500:
                    raise self._unavailable(problem)
            except BadReply as error:
                problem = str(error)
            except ValueError:
                problem = f"the reply is not JSON: {response.text[:80]!r}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            seconds = pause * self._jitter.uniform(0.5, 1.0)
            if told_pause is not None:
                seconds = max(seconds, min(told_pause, MAX_RETRY_AFTER))
                with self._lock:
                    self._next_start = max(self._next_start, time.monotonic() + seconds)
            if time.monotonic() + seconds > deadline:
                raise self._unavailable(problem)
            self._sleep(seconds)
            pause = min(2 * pause, MAX_PAUSE)

    def _sleep(self, seconds: float) -> None:
        if self._closed.wait(max(0.0, seconds)):
            raise self._unavailable("the search was closed")

    def _unavailable(self, problem: str) -> RetrievalUnavailable:
        return RetrievalUnavailable(self._clean(problem))

    def _clean(self, problem: str) -> str:
        return f"{self.name}: {problem.replace(self._engine.key, '***')}"


def online_engine(kind: str, arguments: argparse.Namespace) -> SerpApi | GoogleSearch:
    """Return the engine `kind` (serpapi, google) as the flags and the environment describe it.

    Raises ValueError for flags that can't work, and for missing keys.
    """
    for name in ("search_rate", "search_timeout"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}: found {value}, expected more than 0")
    if arguments.search_url and not arguments.search_url.startswith(("http://", "https://")):
        raise ValueError(f"--search_url: found {arguments.search_url!r}, expected http(s)://...")

    def key(name: str) -> str:
        value = os.environ.get(name, "").strip()
        if not value:
            raise ValueError(f"the environment lacks {name}: export {name}=... before the server is started")
        return value

    if kind == "serpapi":
        url = arguments.search_url or "https://serpapi.com/search"
        return SerpApi(arguments.serp_api_key or key("SERPAPI_API_KEY"), arguments.serp_engine, url)
    url = arguments.search_url or "https://www.googleapis.com/customsearch/v1"
    return GoogleSearch(key("GOOGLE_API_KEY"), arguments.cse_id or key("GOOGLE_CSE_ID"), url)
