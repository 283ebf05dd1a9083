"""The microworld's BM25 server with a delay: each call of /retrieve is answered so many seconds later.

request -> sleep (other requests go on) -> the project's retrieval server -> reply
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.server import create_server, open_socket
from search_r1.search.serving.service import RetrievalService


def delayed(app: Any, seconds: float) -> Any:
    """The ASGI application `app`, with its calls of /retrieve held back."""

    async def held_back(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/retrieve":
            await asyncio.sleep(seconds)
        await app(scope, receive, send)

    return held_back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay_ms", type=float, default=0.0, help="added to each call")
    options = parser.parse_args()
    service = RetrievalService(
        lambda: BM25Retriever(Corpus.open(options.corpus_path)), options.corpus_path, "bm25", topk=2
    )
    service.start_loading().join()
    listener = open_socket("127.0.0.1", options.port)
    listener.listen(2048)
    server = create_server(service)
    server.config.app = delayed(server.config.app, options.delay_ms / 1000)
    server.run(sockets=[listener])
    service.close()


if __name__ == "__main__":
    main()
