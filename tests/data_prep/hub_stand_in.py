"""A local stand-in for the Hugging Face hub: listings, heads and ranges of files, and what can go wrong."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789012345678901234567890123456789"


@dataclass
class Hub:
    """Repositories of data sets, and how their files are sent.

    `cut(length)`: after how many bytes of an answer of that length the connection breaks; None: never.
    """

    repositories: dict[str, dict[str, bytes]]
    cut: Callable[[int], int | None] = lambda length: None
    num_spoiled: int = 0  # the next so many files have a wrong byte
    bytes_per_second: float | None = None
    token: str | None = None  # wanted by the hub

    address: str = ""
    ranges: list[int] = field(default_factory=list)  # where each served file began
    num_bytes: int = 0  # of files, sent

    def listing(self, repository: str) -> bytes:
        siblings = []
        for path, content in self.repositories[repository].items():
            entry: dict = {"rfilename": path, "size": len(content)}
            if len(content) > 1000:  # as large files are kept
                checksum = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": checksum, "size": len(content), "pointerSize": 100}
            siblings.append(entry)
        return json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()


def _handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.reply(401)
            elif listed := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/main", path):
                known = listed.group(1) in hub.repositories
                self.reply(200 if known else 404, hub.listing(listed.group(1)) if known else b"")
            elif wanted := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
                content = hub.repositories.get(wanted.group(1), {}).get(wanted.group(2))
                if content is None:
                    self.reply(404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                else:
                    self.file(content)
            else:
                self.reply(404)

        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def file(self, content: bytes) -> None:
            checksum = hashlib.sha256(content).hexdigest()
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(asked.group(1)) if asked else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{checksum}"')
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if self.command == "GET":
                if hub.num_spoiled:
                    hub.num_spoiled -= 1
                    content = b"?" + content[1:]
                hub.ranges.append(start)
                self.send(content[start:])

        def send(self, body: bytes) -> None:
            end = hub.cut(len(body))
            for i in range(0, len(body), 16_384):
                piece = body[i : i + 16_384] if end is None else body[i : min(i + 16_384, end)]
                try:
                    self.wfile.write(piece)
                except OSError:  # the client is gone
                    break
                hub.num_bytes += len(piece)
                if hub.bytes_per_second:
                    time.sleep(len(piece) / hub.bytes_per_second)
            if end is not None and end < len(body):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serve(hub: Hub):
    """Serves the hub while the block runs."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
