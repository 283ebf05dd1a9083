"""What the tests of the retrieval server share: a backend that can be watched and held, and a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from search_r1.search import index_builder
from search_r1.search.search_backend import Document, RetrievalUnavailable, SearchResult
from search_r1.search.serving.batching import BatchSettings
from search_r1.search.serving.service import RetrievalService

DOCUMENTS = [
    {"id": "a", "contents": '"Amber Harbor"\nA film by Tomas Weld.', "extra": {"deep": [1]}},
    {"id": "b", "contents": '"Tomas Weld"\nA director from Orlen \u2014 \u00e9t\u00e9 \U0001f600.'},
    {"id": "c", "contents": '"Orlen"\nA town.'},
]


class EchoRetriever:
    """Answers a query with `topk` documents that name it. It stops while `gate` is clear, fails for a query
    with "poison" in it, and is out of service for one with "offline"."""

    name = "echo"
    num_documents: int | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.closed = False

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        self.calls.append((list(queries), topk))
        self.entered.set()
        self.gate.wait(60)
        if any("poison" in query for query in queries):
            raise ValueError("the backend choked")
        if any("offline" in query for query in queries):
            raise RetrievalUnavailable("over its limit")
        documents = [[echo(query, place) for place in range(topk)] for query in queries]
        return documents, [[1.0 / (place + 1) for place in range(topk)] for _ in queries]

    @property
    def searched(self) -> list[str]:
        """All queries that it was asked, in order."""
        return [query for queries, _ in self.calls for query in queries]

    def describe(self) -> dict[str, Any]:
        return {"backend": "echo"}

    def close(self) -> None:
        self.closed = True


def echo(query: str, place: int) -> Document:
    """The document of EchoRetriever."""
    return Document.from_fields({"id": f"{query}/{place}", "contents": f'"{query}"\nplace {place}'})


def echo_service(
    retriever: EchoRetriever | None = None, api_key: str | None = None, **settings: Any
) -> RetrievalService:
    """A loaded service over an EchoRetriever."""
    retriever = retriever or EchoRetriever()
    service = RetrievalService(
        lambda: retriever, "memory", "echo", topk=3, settings=BatchSettings(**settings), api_key=api_key
    )
    service.start_loading().join(timeout=10)
    assert service.error is None
    return service


def http(address: str, **options: Any) -> httpx.Client:
    """A client that ignores the machine's proxy settings."""
    return httpx.Client(base_url=address, trust_env=False, timeout=30, **options)


def post(client: httpx.Client, body: object) -> httpx.Response:
    return client.post("/retrieve", json=body)


def write_corpus(folder: Path, more: str = "") -> Path:
    """DOCUMENTS as a file, with `more` at its end."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS) + more)
    return path


def write_bm25(folder: Path) -> Path:
    """Builds folder/bm25, an index of DOCUMENTS; returns their file."""
    corpus = write_corpus(folder)
    flags = ["--corpus_path", str(corpus), "--save_dir", str(folder), "--num_processes", "1"]
    assert index_builder.main(["--retrieval_method", "bm25", *flags]) == 0
    return corpus


@contextmanager
def start_process(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The server as a program, on a free port of this machine; killed at the end if it still runs."""
    command = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_address(process: subprocess.Popen[str]) -> str:
    """http://HOST:PORT from the line that the program prints when it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("retrieval server on http://"), line
    return line.split()[-1].removesuffix("/retrieve")
