"""The search client: queries in, documents out, over Search-R1's `/retrieve` JSON, one server or several.

    submit([query, ...]) -> one Future per query, that ends in its documents or in a SearchError
        an answer that is kept in memory -> done
        else -> background thread: Dispatcher (dispatch.py) -> POST /retrieve -> Futures, memory

Whatever a server sends, it can at worst end a search in a SearchError. Training and `infer.py` search through
this client.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from urllib.parse import urlsplit, urlunsplit

import httpx

from search_r1.search.dispatch import Dispatcher, Documents, Key
from search_r1.search.replies import FoundDocument, SearchError, without_surrogates

__all__ = ["API_KEY_VARIABLE", "FoundDocument", "SearchClient", "SearchError", "parse_urls"]

API_KEY_VARIABLE = "SEARCH_R1_API_KEY"
MAX_QUERY_CHARS = 2048  # the rest of a longer query is not sent, as no search engine makes use of it
KEEP_ALIVE_SECONDS = 4.0  # how long an idle connection is kept; uvicorn closes its end after 5
CLOSE_SECONDS = 2.0


class SearchClient:
    """A client of one or several retrieval servers.

    Its thread starts at the first search and ends with `close`. Threads may share a client. A process that
    was forked after the client's first search may not use it.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        topk: int = 3,
        timeout: float = 60.0,
        cache_size: int = 10_000,
        *,
        api_key: str | None = None,
        use_proxy: bool = False,
    ) -> None:
        """Create a client. No server is asked yet.

        Args:
            urls: Addresses, see `parse_urls`.
            topk: Documents per query, where `submit` does not say.
            timeout: Seconds from `submit` until a search has failed, retries included.
            cache_size: How many answers are kept in memory; 0 for none. A run's index does not change.
            api_key: The key that is sent as a Bearer token. None means the value of the environment variable
                SEARCH_R1_API_KEY.
            use_proxy: Go through the proxies that HTTP_PROXY and its kin name.

        Raises:
            ValueError: For an argument that can't work.
        """
        if topk < 1:
            raise ValueError(f"retriever.topk: found {topk}, expected at least 1")
        if timeout <= 0:
            raise ValueError(f"retriever.timeout: found {timeout}, expected more than 0 seconds")
        key = (os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key).strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"{API_KEY_VARIABLE}: found a key with other than printable ASCII characters")
        self.urls = parse_urls(urls)
        self.topk = topk
        self.timeout = timeout
        try:
            http = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                trust_env=use_proxy,
                follow_redirects=True,
                timeout=None,  # the dispatcher keeps the time, as httpx only bounds each wait for bytes
                limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
            )
        except (ValueError, ImportError, OSError) as error:
            raise ValueError(f"retriever.use_proxy: the proxy settings can't be used ({error})") from None
        self._dispatcher = Dispatcher(self.urls, http, timeout, self._keep)
        self._lock = threading.Lock()  # guards all below
        self._cache_size = cache_size
        self._cache: OrderedDict[Key, Documents] = OrderedDict()
        self._num_searches = self._num_cached = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = 0  # the process that the thread runs in
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def submit(self, queries: Sequence[str], topk: int | None = None) -> list[Future[Documents]]:
        """Start searches and return at once.

        Args:
            queries: The queries.
            topk: Documents per query. None means the client's own `topk`.

        Returns:
            One Future per query, in order. It ends in the query's documents or in a SearchError.

        Raises:
            RuntimeError: If the client is closed, or was made in another process.
        """
        topk = self.topk if topk is None else topk
        futures: list[Future[Documents]] = [Future() for _ in queries]
        new: list[tuple[Key, Future[Documents]]] = []
        with self._lock:
            if self._closed:
                raise RuntimeError("the search client is closed")
            for query, future in zip(queries, futures, strict=True):
                key = (without_surrogates(query)[:MAX_QUERY_CHARS], topk)
                if key in self._cache:
                    self._cache.move_to_end(key)
                    future.set_result(self._cache[key])
                else:
                    new.append((key, future))
            self._num_searches += len(futures)
            self._num_cached += len(futures) - len(new)
            if new:
                self._start_thread()
                self._loop.call_soon_threadsafe(self._dispatcher.accept, new, time.monotonic())
        return futures

    def batch_search(self, queries: Sequence[str], topk: int | None = None) -> list[Documents]:
        """Return the documents of each query, after waiting for them.

        Raises SearchError if one search failed.
        """
        return [future.result() for future in self.submit(queries, topk)]

    def statistics(self) -> dict[str, float]:
        """Return counters since the client was made.

        These are `searches`, how many of them were `cache_hits`, and dispatch.STATISTICS.
        """
        counts = {"searches": self._num_searches, "cache_hits": self._num_cached}
        return counts | self._dispatcher.statistics

    def close(self) -> None:
        """End requests and the thread at once. Searches that still wait fail.

        It may be called twice.
        """
        with self._lock:
            was_closed = self._closed
            self._closed = True
        if self._thread is None or was_closed or self._process != os.getpid():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not threading.current_thread():  # a Future's callback may close the client
            self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> SearchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, key: Key, documents: Documents) -> None:
        if self._cache_size > 0:
            with self._lock:
                self._cache[key] = documents
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)

    def _start_thread(self) -> None:
        if self._thread is not None:
            if self._process != os.getpid():
                raise RuntimeError("the search client was made in another process: make one here")
            return
        started = threading.Event()

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            started.set()
            await self._stop.wait()
            await self._dispatcher.close()

        self._process = os.getpid()
        self._thread = threading.Thread(target=asyncio.run, args=(run(),), name="search-client", daemon=True)
        self._thread.start()
        started.wait()


def parse_urls(urls: str | Sequence[str]) -> list[str]:
    """Return the addresses in a list, or in one string with commas between them.

    `/retrieve` is added to an address without a path. Raises ValueError for what is no address.
    """
    entries = urls.split(",") if isinstance(urls, str) else list(urls)
    addresses = []
    for url in filter(None, (url.strip() for url in entries)):
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ValueError(
                f"retriever url: found {url!r}, expected an address such as http://127.0.0.1:8000/retrieve "
                "(several are separated by commas)"
            )
        addresses.append(urlunsplit(split._replace(path="/retrieve")) if split.path in ("", "/") else url)
    if not addresses:
        raise ValueError("retriever url: found nothing, expected http://HOST:PORT/retrieve")
    return list(dict.fromkeys(addresses))
