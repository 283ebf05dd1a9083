"""Servers for the client's tests: one whose answers a test decides, one of raw bytes, one in a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
Answer = tuple[int, object] | tuple[int, object, Mapping[str, str]]  # status, JSON or text, headers


class ScriptedServer:
    """Answers each POST with `answer(body)`.

    `requests`: the bodies in the order they came; `headers`: theirs; `times`: when (time.monotonic)."""

    def __init__(self, answer: Callable[[dict], Answer]) -> None:
        self.requests: list[dict] = []
        self.headers: list[Mapping[str, str]] = []
        self.times: list[float] = []
        self.num_connections = 0
        self.answer = answer
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.num_connections += 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.times.append(time.monotonic())
                outer.headers.append(dict(self.headers))
                outer.requests.append(body)
                status, reply, headers = (*outer.answer(body), {})[:3]
                raw = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
                with contextlib.suppress(ConnectionError):  # the client may have given up
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            # of 5, further connections may be reset
            daemon_threads = True
            request_queue_size = 64

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/retrieve"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def queries(self) -> list[list[str]]:
        return [body["queries"] for body in self.requests]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class RawServer:
    """Reads something of each connection, then does with its socket what `behave(connection)` says."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self.num_connections = 0
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/retrieve"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `stop` closed the listener
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            self._behave(connection)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


class ServerProcess:
    """`python -m search_r1.search.server` on a port that stays the same over restarts."""

    def __init__(self, corpus: Path, *flags: str) -> None:
        self.corpus = corpus
        self.flags = flags
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/retrieve"

    def start(self, wait: bool = True) -> ServerProcess:
        command = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--corpus_path", str(self.corpus), "--retriever_name", "bm25"]
        command += self.flags
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("retrieval server on "):
                self.port = httpx.URL(line.split()[-1]).port or 0
                break
        assert self.port, f"the server ended with status {self.process.wait(10)}"
        while wait and not self.is_ready():
            time.sleep(0.05)
        return self

    def is_ready(self) -> bool:
        try:
            reply = httpx.get(self.url.replace("retrieve", "health"), trust_env=False)
        except httpx.TransportError:
            return False
        return reply.json().get("status") == "ready"

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The process keeps its connections, and does nothing."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


def found(query: str) -> list[dict]:
    """What scripted servers find: one document that names the query."""
    return [{"document": {"id": "1", "contents": f'"T"\n{query}'}, "score": 1.5}]


def find(body: dict) -> Answer:
    return 200, {"result": [found(query) for query in body["queries"]]}


def text_of(query: str) -> str:
    """The contents of the document that `find` finds."""
    return f'"T"\n{query}'
