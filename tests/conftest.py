"""What tests of several folders share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from search_r1.search.server import RetrievalService


@contextmanager
def _serve(service: RetrievalService) -> Iterator[str]:
    import uvicorn

    from search_r1.search.server import create_app, open_socket

    listener = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[RetrievalService], AbstractContextManager[str]]:
    """serve(service): a retrieval server on a free port while the block runs; yields its address."""
    return _serve


@pytest.fixture(scope="session")
def serve_documents(serve) -> Callable[..., AbstractContextManager[str]]:
    """serve_documents(documents, topk=3): the same for a service over these documents, loaded."""
    from search_r1.search.bm25 import BM25Retriever
    from search_r1.search.server import RetrievalService

    def start(documents: list[dict], topk: int = 3) -> AbstractContextManager[str]:
        service = RetrievalService(lambda: BM25Retriever(documents), "memory", "bm25", topk)
        service.start_loading().join(timeout=30)
        assert service.error is None
        return serve(service)

    return start
