"""What tests of several folders share."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from search_r1.search.serving.service import RetrievalService


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m "slow ..." or -m vllm a file that does not name the mark is not imported, and with "slow and
    alone" only one that names `alone` or `ray` besides: to import all of them takes longer than most tests.
    With -m "not slow" a file is not imported whose tests are all slow.
    """
    mark, _, more = config.option.markexpr.partition(" ")
    if not collection_path.name.startswith("test_"):
        return None
    if config.option.markexpr == "not slow":
        text = collection_path.read_text()
        return True if re.search(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", text, re.M) else None
    if mark not in ("slow", "vllm"):
        return None
    files = [path for path in (collection_path, collection_path.with_name("conftest.py")) if path.exists()]
    text = "".join(path.read_text() for path in files)
    is_alone = more != "and alone" or "mark.alone" in text or "mark.ray" in text
    return None if f"mark.{mark}" in text and is_alone else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Ray cluster do not run beside others. Those with the longest limit begin first: the others
    are then enough for the other processes.
    """

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return 0.0 if marker is None else marker.args[0]

    items.sort(key=limit, reverse=True)
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.alone)


@contextmanager
def _serve(service: RetrievalService) -> Iterator[str]:
    from search_r1.search.server import create_server, open_socket

    listener = open_socket("127.0.0.1", 0)
    listener.listen()
    server = create_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
        service.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[RetrievalService], AbstractContextManager[str]]:
    """serve(service): a retrieval server on a free port while the block runs; yields its address."""
    return _serve


@pytest.fixture(scope="session")
def serve_documents(serve) -> Callable[..., AbstractContextManager[str]]:
    """serve_documents(documents, topk=3): the same for a service over these documents, loaded."""
    from corpus_parts import corpus_of_documents

    from search_r1.search.bm25 import BM25Retriever
    from search_r1.search.serving.service import RetrievalService

    def start(documents: list[dict], topk: int = 3) -> AbstractContextManager[str]:
        def load() -> BM25Retriever:
            return BM25Retriever(corpus_of_documents(documents))

        service = RetrievalService(load, "memory", "bm25", topk)
        service.start_loading().join(timeout=120)  # kernels are compiled, perhaps on a busy machine
        assert service.error is None
        return serve(service)

    return start
