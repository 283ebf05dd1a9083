"""The retrieval server: `python -m search_r1.search.server --corpus_path corpus.jsonl` answers `/retrieve`.

    POST /retrieve {"queries": [str], "topk": int?, "return_scores": bool?}
        -> {"result": [[{"document": {"contents": ..., ...}, "score": float}, ...], ...]}   one list per query
           (without return_scores: lists of plain documents)
    GET /health -> {"status": "loading" | "ready", "backend", "corpus_path", "num_documents"}

The JSON and the flags are Search-R1's. The corpus is read in the background: until it is there `/health` says
"loading" and `/retrieve` answers 503. What a request may ask for is checked here, at the door: a request that
can't be served gets a 4xx that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from search_r1.search.corpus import Document, read_corpus

MAX_TOPK = 1000
MAX_QUERIES = 16_384
MAX_QUERY_CHARS = 16_384
MAX_BODY_BYTES = 32 * 2**20
RETRY_AFTER_SECONDS = 2
SHUTDOWN_SECONDS = 5  # given to open requests when the server is stopped; a client may never finish its own


class Retriever(Protocol):
    """A search backend. Called from one thread at a time."""

    name: str
    documents: list[Document]

    def batch_search(self, queries: list[str], topk: int) -> tuple[list[list[Document]], list[list[float]]]:
        """For each query at most `topk` documents, best first, and their scores."""
        ...


@dataclass(frozen=True)
class RetrieveRequest:
    """A checked request: 0 to MAX_QUERIES queries, 1 <= topk <= MAX_TOPK."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_request(body: bytes, default_topk: int) -> RetrieveRequest:
    """Checks the JSON of a request; unknown fields are ignored. Raises HTTPException 400, 413 or 422."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not valid JSON (UTF-8)") from None
    queries = fields.get("queries") if isinstance(fields, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, 'expected {"queries": [string, ...], "topk": int, "return_scores": bool}')
    if len(queries) > MAX_QUERIES:
        raise HTTPException(413, f"{len(queries)} queries in one request: at most {MAX_QUERIES} are allowed")
    longest = max(map(len, queries), default=0)
    if longest > MAX_QUERY_CHARS:
        raise HTTPException(413, f"a query of {longest} characters: at most {MAX_QUERY_CHARS} are allowed")
    topk = fields.get("topk")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise HTTPException(422, f"topk: found {str(topk)[:40]}, expected an integer from 1 to {MAX_TOPK}")
    return_scores = fields.get("return_scores")
    if return_scores is not None and not isinstance(return_scores, bool):
        raise HTTPException(422, f"return_scores: found {str(return_scores)[:40]}, expected true or false")
    return RetrieveRequest(queries, topk, bool(return_scores))


async def read_body(request: Request) -> bytes:
    """The body, refused with 413 as soon as it is longer than MAX_BODY_BYTES."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is too large: at most {MAX_BODY_BYTES} bytes are allowed")
    return bytes(body)


class RetrievalService:
    """Holds the backend, from "loading" to "ready", and answers requests in one worker thread."""

    def __init__(self, load: Callable[[], Retriever], corpus_path: str, backend: str, topk: int) -> None:
        """`load` builds the backend; it runs in a thread of its own, started by `start_loading`."""
        self._load = load
        self.corpus_path, self.backend, self.topk = corpus_path, backend, topk
        self.retriever: Retriever | None = None
        self.error: Exception | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    def start_loading(self, on_error: Callable[[], None] = lambda: None) -> threading.Thread:
        """Loads in the background; a failure is kept in `error`, and `on_error` is called."""

        def work() -> None:
            try:
                self.retriever = self._load()
            except Exception as error:  # the thread's only way to tell; the main thread prints it
                self.error = error
                on_error()

        thread = threading.Thread(target=work, name="load-corpus", daemon=True)
        thread.start()
        return thread

    def health(self) -> dict[str, object]:
        ready = self.retriever is not None
        return {
            "status": "ready" if ready else "loading",
            "backend": self.backend,
            "corpus_path": self.corpus_path,
            "num_documents": len(self.retriever.documents) if self.retriever is not None else None,
        }

    async def retrieve(self, body: bytes) -> bytes:
        """The JSON reply to one request body. Raises HTTPException."""
        asked = parse_request(body, self.topk)
        if self.retriever is None:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise HTTPException(503, f"still loading {self.corpus_path}", headers=headers)
        return await asyncio.get_running_loop().run_in_executor(self._worker, answer, self.retriever, asked)


def answer(retriever: Retriever, asked: RetrieveRequest) -> bytes:
    """Searches and writes the reply (ASCII JSON, so that any text survives)."""
    documents, scores = retriever.batch_search(asked.queries, asked.topk)
    result: list[list[object]] = [list(row) for row in documents]
    if asked.return_scores:
        result = [
            [{"document": document, "score": score} for document, score in zip(row, row_scores, strict=True)]
            for row, row_scores in zip(documents, scores, strict=True)
        ]
    return json.dumps({"result": result}).encode("ascii")


def create_app(service: RetrievalService) -> FastAPI:
    """The two routes over a service."""
    app = FastAPI(title="Search-R1 retrieval server")

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        return Response(await service.retrieve(await read_body(request)), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, object]:
        return service.health()

    return app


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m search_r1.search.server", description="Retrieval server")
    parser.add_argument("--corpus_path", required=True, help='jsonl file, lines {"id", "contents"}')
    parser.add_argument("--index_path", help="folder in which the index is kept; without it: in memory")
    parser.add_argument("--topk", type=int, default=3, help="documents per query when a request does not say")
    parser.add_argument("--retriever_name", default="bm25", help="bm25 (dense retrievers are not there yet)")
    parser.add_argument("--retriever_model", help="encoder of a dense retriever; not used by bm25")
    parser.add_argument("--faiss_gpu", action="store_true", help="FAISS on GPUs; not used by bm25")
    parser.add_argument("--host", default="0.0.0.0", help="where to listen; 127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port, printed at the start")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for flags that can't be served, before anything is loaded."""
    name = arguments.retriever_name.lower()
    if name != "bm25":
        raise ValueError(
            f"--retriever_name: found {name!r}, this server has only 'bm25' so far. Start it with "
            "--retriever_name bm25, or point retriever.url at a Search-R1 server for dense retrieval"
        )
    if not 1 <= arguments.topk <= MAX_TOPK:
        raise ValueError(f"--topk: found {arguments.topk}, expected 1 to {MAX_TOPK}")
    if not Path(arguments.corpus_path).is_file():
        raise ValueError(f"--corpus_path: there is no file {arguments.corpus_path}")
    if arguments.index_path and Path(arguments.index_path).is_file():
        raise ValueError(f"--index_path: {arguments.index_path} is a file; bm25 keeps its index in a folder")


def load_bm25(corpus_path: str, index_path: str | None) -> Retriever:
    """Reads the corpus and builds (or reads) its BM25 index. Raises ValueError for a broken corpus."""
    from search_r1.search.bm25 import BM25Retriever  # numba and its kin take a second to import

    return BM25Retriever(read_corpus(corpus_path), index_path)


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, so that a taken port is one clear error. Raises ValueError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named asyncio switches Nagle's algorithm off; without it a reply can wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"can't listen on {host}:{port} ({error}): try another --host or --port") from None
    return listener


def main(argv: list[str] | None = None) -> int:
    """Serves until interrupted. Returns the exit status: 1 for a wrong flag or an unreadable corpus."""
    arguments = build_parser().parse_args(argv)
    try:
        check_arguments(arguments)
        listener = open_socket(arguments.host, arguments.port)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    service = RetrievalService(
        lambda: load_bm25(arguments.corpus_path, arguments.index_path),
        corpus_path=arguments.corpus_path,
        backend="bm25",
        topk=arguments.topk,
    )
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    service.start_loading(on_error=stop)
    listener.listen()  # before it is said: who reads the line can connect
    print(f"retrieval server on http://{arguments.host}:{listener.getsockname()[1]}/retrieve", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C, after the open requests were answered
        server.run(sockets=[listener])
    if service.error is not None:
        print(f"error: {service.error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
