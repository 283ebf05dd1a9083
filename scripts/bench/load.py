"""The clients of the retrieval benchmark: one process, one thread, many keep-alive connections.

    queries file -> each client sends the next unasked queries, waits for the reply, sends again -> figures

HTTP/1.1 is written by hand over sockets and one selector, so that the clients cost little beside the server.
A run starts no request after `seconds`, waits for the last reply and counts everything. Each CPU second of
the server then belongs to a counted reply, however long a reply takes.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from pathlib import Path

import numpy as np
import psutil

REPLY_TIMEOUT = 600.0  # seconds without any reply after which the server is considered dead
HEAD = "POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "


def processes_of(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and its children, also of those that have ended."""
    times = [process.cpu_times() for process in processes_of(pid)]
    return sum(sum(cpu_times[:2]) for cpu_times in times) + times[0].children_user + times[0].children_system


def run_load(
    server: tuple[int, int],
    clients: int,
    queries_per_request: int,
    topk: int,
    queries: Path,
    first: int,
    seconds: float,
) -> dict[str, float]:
    """Run the clients once against a server and return the figures of the run.

    Args:
        server: (port, process id).
        clients: number of clients.
        queries_per_request: queries that a client asks in a request.
        topk: documents for each query.
        queries: file with a query a line. No text is asked twice: after the last line come the same lines
            with their words rotated.
        first: how many lines of the file were asked before.
        seconds: no request starts after this time.

    Raises:
        RuntimeError: a reply is not a 200, or there is none for a long time.
    """
    port, pid = server
    lines = queries.read_text(encoding="utf-8").splitlines()
    num_asked = first

    def new_request() -> bytes:
        nonlocal num_asked
        texts = []
        for number in range(num_asked, num_asked + queries_per_request):
            turn, index = divmod(number, len(lines))
            words = lines[index].split()
            if turn >= len(words):
                raise RuntimeError(f"no unasked query is left after {number}: make a longer queries file")
            texts.append(" ".join(words[turn:] + words[:turn]))
        num_asked += queries_per_request
        body = json.dumps({"queries": texts, "topk": topk, "return_scores": True})
        return f"{HEAD}{len(body)}\r\n\r\n{body}".encode("ascii")

    latencies: list[float] = []
    cpu_before = cpu_seconds(pid)
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            connection = socket.create_connection(("127.0.0.1", port), timeout=REPLY_TIMEOUT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(new_request())
            # The state of a connection: when its request was sent, and the reply so far.
            selector.register(connection, selectors.EVENT_READ, [time.perf_counter(), b""])
        while selector.get_map():
            ready = selector.select(REPLY_TIMEOUT)
            if not ready:
                raise RuntimeError(f"no reply for {REPLY_TIMEOUT:.0f} s")
            for key, _ in ready:
                state = key.data
                connection = key.fileobj
                data = connection.recv(2**18)  # type: ignore[union-attr]
                state[1] += data
                head, separator, body = state[1].partition(b"\r\n\r\n")
                if not data or (separator and b" 200" not in head.split(b"\r\n")[0]):
                    raise RuntimeError(f"the server answered {state[1][:300]!r}")
                if not separator or len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
                    continue
                now = time.perf_counter()
                latencies.append(now - state[0])
                if now - start < seconds:
                    request = new_request()
                    state[:] = [time.perf_counter(), b""]
                    connection.sendall(request)  # type: ignore[union-attr]
                else:
                    selector.unregister(connection)
                    connection.close()  # type: ignore[union-attr]
    wall = time.perf_counter() - start
    server_cpu = cpu_seconds(pid) - cpu_before
    return {
        "queries": num_asked - first,
        "queries_per_s": (num_asked - first) / wall,
        "queries_per_cpu_s": (num_asked - first) / max(server_cpu, 0.01),  # CPU time ticks every 10 ms
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "rss_mb": sum(process.memory_info().rss for process in processes_of(pid)) / 1e6,
    }
