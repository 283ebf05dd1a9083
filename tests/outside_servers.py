"""Servers of the outside, as a hub or wandb: silent ones, refusing ones, absent ones, and a hub of files."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40
KINDS = ("silent", "refusing", "forbidding", "absent")


class SilentServer:
    """Accepts connections and never answers. `connections` are those that it has accepted."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                self.connections.append(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=10)
        for connection in (*self.connections, self._listener):
            connection.close()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on a free port while the block runs; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class Forbidding(BaseHTTPRequestHandler):
    """Answers all requests with 403, as a proxy does that lets nothing out."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server_that_is_away(kind: str) -> Iterator[str]:
    """Yield the address of a server of one of KINDS."""
    if kind == "silent":
        server = SilentServer()
        try:
            yield server.url
        finally:
            server.close()
    elif kind == "forbidding":
        with serving(Forbidding) as url:
            yield url
    elif kind == "refusing":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
    else:
        yield "http://hub.invalid"


@contextmanager
def hub_of_files(models: dict[str, Path]) -> Iterator[str]:
    """Serve folders as models, by what a download uses of the hub's interface; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = next((name for name in models if f"/{name}/" in f"{self.path}/"), None)
            if name is None:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif self.path.startswith("/api/"):
                files = [file for file in models[name].iterdir() if file.is_file()]
                answer: object = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                    for file in files
                ]
                if "/tree/" not in self.path:
                    siblings = [{"rfilename": file.name} for file in files]
                    answer = {"id": name, "sha": COMMIT, "siblings": siblings}
                self.reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
            else:
                file = models[name] / self.path.rpartition("/")[2].partition("?")[0]
                if file.is_file():
                    content = file.read_bytes()
                    digest = hashlib.sha256(content).hexdigest()
                    self.reply(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})
                else:
                    headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                    self.reply(404, b"", headers)

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url


def put_into_cache(cache: Path, name: str, folder: Path) -> Path:
    """Copy a model into a hub's cache, as a download leaves it; return its folder there."""
    entry = cache / f"models--{name.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, entry / "snapshots" / COMMIT))
