"""A server on this machine that speaks as SerpAPI and Google's Custom Search do.

    GET  /search           SerpAPI          GET /customsearch/v1    Google

`faults` holds what the next requests get instead of an answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "a-very-secret-key"
Fault = tuple[int, dict[str, str], bytes] | float
"""(status, headers, body), or seconds of silence before the connection is closed."""


class StandIn:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.requests: list[dict[str, Any]] = []  # path, parameters, headers, time
        self.address = ""
        self.num_results = 25
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    @property
    def queries(self) -> list[str]:
        return [request["parameters"].get("q", "") for request in self.requests]

    def answer(self, path: str, parameters: dict[str, Any]) -> tuple[int, Any]:
        if path == "/search":
            return self.serpapi(parameters)
        return self.google(parameters)

    def serpapi(self, parameters: dict[str, str]) -> tuple[int, Any]:
        if parameters.get("api_key") != KEY:
            return 401, {
                "error": f"Invalid API key {parameters.get('api_key')}. Your API key should be here: ..."
            }
        query = parameters["q"]
        start = int(parameters.get("start", 0))
        found = range(start, min(start + 10, self.num_results))
        reply: dict[str, Any] = {
            "search_metadata": {"id": "1", "status": "Success"},
            "search_parameters": {"engine": parameters["engine"], "q": query},
        }
        if not found:
            return 200, reply | {"error": "Google hasn't returned any results for this query."}
        if start == 0 and query.startswith("who"):
            reply["answer_box"] = {
                "type": "organic_result",
                "title": "Amber Harbor (film)",
                "answer": "Tomas Weld",
                "snippet": "Amber Harbor is a film by Tomas Weld.",
                "link": "https://example.org/film",
            }
            reply["related_questions"] = [
                {
                    "question": "Who is Tomas Weld?",
                    "snippet": "A director.",
                    "link": "https://example.org/weld",
                }
            ]
        reply["organic_results"] = [
            {
                "position": n + 1,
                "title": f"T{n}",
                "link": f"https://example.org/{n}",
                "snippet": f"{query} {n}",
            }
            for n in found
        ]
        return 200, reply

    def google(self, parameters: dict[str, str]) -> tuple[int, Any]:
        if parameters.get("key") != KEY:
            return 400, {
                "error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}
            }
        start = int(parameters.get("start", 1))
        num = int(parameters.get("num", 10))
        if num > 10 or start + num > 101:
            return 400, {"error": {"code": 400, "message": "Request contains an invalid argument."}}
        items = [
            {
                "kind": "customsearch#result",
                "title": f"T{n}",
                "link": f"{self.address}/page/{n}",
                "snippet": f"{parameters['q']} snippet {n}",
            }
            for n in range(start - 1, min(start - 1 + num, self.num_results))
        ]
        reply: dict[str, Any] = {
            "kind": "customsearch#search",
            "searchInformation": {"totalResults": str(self.num_results)},
        }
        return 200, reply | ({"items": items} if items else {})


@contextmanager
def serve_stand_in() -> Iterator[StandIn]:
    """The server on a free port while the block runs."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            path = parts.path
            parameters = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            with stand_in.lock:
                stand_in.requests.append(
                    {"path": path, "parameters": parameters, "headers": headers, "time": time.monotonic()}
                )
                fault = stand_in.faults.popleft() if stand_in.faults else None
            if isinstance(fault, float):
                stand_in.stopped.wait(fault)
                self.close_connection = True
            elif fault is not None:
                self.send(*fault)
            else:
                status, reply = stand_in.answer(path, parameters)
                self.send(status, {"Content-Type": "application/json"}, json.dumps(reply).encode())

        def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stand_in.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.stopped.set()
        server.shutdown()
        server.server_close()
