"""The check, before anything is loaded, that the search server of a configuration answers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from search_r1.search.client import SearchClient, SearchError, parse_urls
from verl.config import Config

SECONDS = 5.0  # a server that is there may be busy
SECONDS_WITHOUT_SERVER = 1.0


def check_search(config: Config) -> None:
    """Raise ValueError if no search server answers."""
    retriever = config.retriever
    may_answer = retriever.use_proxy or _listens_any(parse_urls(retriever.url))
    seconds = SECONDS if may_answer else SECONDS_WITHOUT_SERVER
    with SearchClient(retriever.url, retriever.topk, seconds, use_proxy=retriever.use_proxy) as client:
        try:
            client.batch_search(["is anybody there"])
        except SearchError as error:
            raise ValueError(
                f"the search server does not answer: {error}. Start one with `bash retrieval_launch.sh`, or "
                "say where it is: retriever.url=http://host:port/retrieve"
            ) from None


def _listens_any(urls: Sequence[str]) -> bool:
    """Return whether a server of these addresses takes connections, as far as a second tells."""
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=SECONDS_WITHOUT_SERVER).close()
        except ConnectionRefusedError:
            continue
        except OSError:  # a name that is not known, or a host that does not answer yet
            return True
        return True
    return False
