"""The clients of the retrieval benchmark: one process, one thread, many keep-alive connections.

    queries file -> each client sends the next unasked queries, waits for the reply, sends again -> LoadResult

Hand-written HTTP/1.1 over sockets and one selector, so that the clients cost little beside the server. A run
starts no request after `seconds`, waits for the last reply and counts everything: each CPU second of the
server belongs to a counted reply, however long a reply takes.

scripts/bench_retrieval.py starts it: python scripts/bench/load.py '{"port": 8000, ...}'
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

REPLY_TIMEOUT = 600.0  # seconds without any reply after which the server is taken for dead
NUM_SAMPLES = 8


@dataclass(frozen=True)
class Load:
    """What is asked of the server at `port`, which is the process `pid`."""

    port: int
    pid: int
    clients: int
    queries_per_request: int
    topk: int
    queries_path: str  # one query a line
    first_query: int  # how many queries were asked before
    seconds: float  # no request starts after them


@dataclass(frozen=True)
class LoadResult:
    """What one run saw. `samples`: (body of the request, body of the reply) of its first requests."""

    queries: int
    queries_per_s: float
    queries_per_cpu_s: float  # CPU seconds of the server alone
    p50_ms: float
    p99_ms: float
    rss_mb: float  # of the server, at the end
    samples: list[tuple[str, str]]


class UniqueQueries:
    """Never the same text twice: the lines of a file, then the same lines with their words rotated."""

    def __init__(self, lines: list[str], start: int) -> None:
        self._lines, self.used = lines, start

    def take(self, count: int) -> list[str]:
        """The next `count` queries. Raises ValueError when there are none left."""
        return [self._next() for _ in range(count)]

    def _next(self) -> str:
        turn, place = divmod(self.used, len(self._lines))
        self.used += 1
        words = self._lines[place].split()
        if turn >= len(words):
            raise ValueError(f"no unasked query is left after {self.used - 1}: make a longer queries file")
        return " ".join(words[turn:] + words[:turn])


class Client:
    """One connection, with one request at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=REPLY_TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request, self.sent_at = b"", 0.0
        self._reply = bytearray()

    def send(self, body: bytes) -> None:
        self._reply.clear()
        self.request, self.sent_at = body, time.perf_counter()
        head = "POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def receive(self) -> bytes | None:
        """Reads what has come; the body when the reply is whole. Raises RuntimeError unless it is a 200."""
        data = self.socket.recv(2**18)
        if not data:
            raise RuntimeError("the server closed a connection in the middle of a reply")
        self._reply += data
        end = self._reply.find(b"\r\n\r\n")
        if end < 0:
            return None
        status, *lines = bytes(self._reply[:end]).lower().split(b"\r\n")
        if b" 200" not in status:
            raise RuntimeError(f"the server answered {bytes(self._reply[:300])!r}")
        (length,) = (int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        return bytes(self._reply[end + 4 :]) if len(self._reply) >= end + 4 + length else None


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children, also of those that have ended."""
    root = psutil.Process(pid)
    total = sum(sum(process.cpu_times()[:2]) for process in [root, *root.children(recursive=True)])
    return total + root.cpu_times().children_user + root.cpu_times().children_system


def run_load(load: Load) -> LoadResult:
    """One run. Raises RuntimeError for a reply that is not a 200."""
    lines = Path(load.queries_path).read_text(encoding="utf-8").splitlines()
    queries = UniqueQueries(lines, load.first_query)

    def new_body() -> bytes:
        asked = queries.take(load.queries_per_request)
        return json.dumps({"queries": asked, "topk": load.topk, "return_scores": True}).encode("ascii")

    latencies: list[float] = []
    samples: dict[bytes, bytes] = {}
    clients = [Client(load.port) for _ in range(load.clients)]
    cpu_before, start = cpu_seconds(load.pid), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send(new_body())
            if len(samples) < NUM_SAMPLES:
                samples[client.request] = b""
        while selector.get_map():
            ready = selector.select(REPLY_TIMEOUT)
            if not ready:
                raise RuntimeError(f"no reply for {REPLY_TIMEOUT:.0f} s")
            for key, _ in ready:
                client = key.data
                body = client.receive()
                if body is None:
                    continue
                now = time.perf_counter()
                latencies.append(now - client.sent_at)
                if client.request in samples:
                    samples[client.request] = body
                if now - start < load.seconds:
                    client.send(new_body())
                else:
                    selector.unregister(client.socket)  # the server may close it while others wait
    wall, server_cpu = time.perf_counter() - start, cpu_seconds(load.pid) - cpu_before
    for client in clients:
        client.socket.close()
    root = psutil.Process(load.pid)
    num_queries = len(latencies) * load.queries_per_request
    return LoadResult(
        queries=num_queries,
        queries_per_s=num_queries / wall,
        queries_per_cpu_s=num_queries / max(server_cpu, 0.01),  # the clock of CPU time ticks every 10 ms
        p50_ms=float(np.percentile(latencies, 50)) * 1e3,
        p99_ms=float(np.percentile(latencies, 99)) * 1e3,
        rss_mb=sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 1e6,
        samples=[(request.decode(), reply.decode()) for request, reply in samples.items()],
    )


if __name__ == "__main__":
    json.dump(asdict(run_load(Load(**json.loads(sys.argv[1])))), sys.stdout)
