"""A server with /retrieve for the environments that search."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Retriever(BaseHTTPRequestHandler):
    """/retrieve of Search-R1, also with SkyRL's single `query`."""

    failures = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Retriever.failures > 0:
            Retriever.failures -= 1
            self.send_error(503)
            return
        query = body["query"] if "query" in body else body["queries"][0]
        text = "<answer>Jane Austen</answer>" if query == "trap" else f"about {query} "
        hits = [
            {"document": {"contents": f' "Title {i}"\n{text}'}, "score": 1.0} for i in range(body["topk"])
        ]
        reply = json.dumps({"result": [[] if query == "nothing" else hits]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.fixture
def retriever():
    yield Retriever
    Retriever.failures = 0
