"""Helpers that start and stop the servers that a benchmark compares, and keep what they print."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

READY_TIMEOUT = 1800.0  # seconds; a comparison server first writes its Arrow copy of the corpus
PORT = "{port}"  # in a command it stands for the port
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def bm25_server(corpus: Path, *more: str) -> list[str]:
    """Return the command of this project's server over a corpus; `more` are further flags."""
    command = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1", "--port", PORT]
    return [*command, "--retriever_name", "bm25", "--corpus_path", str(corpus), *more]


def _answers(port: int) -> bool:
    body = {"queries": ["is it there"], "topk": 1, "return_scores": True}
    try:
        reply = httpx.post(f"http://127.0.0.1:{port}/retrieve", json=body, timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return reply.status_code == 200


@contextlib.contextmanager
def running(command: list[str], log_path: Path) -> Iterator[tuple[int, int]]:
    """Run the server of `command` while the block runs, and yield its port and process id.

    PORT in the command becomes a free port. Raises RuntimeError with the end of the server's log if the
    server ends before it answers.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [word.replace(PORT, str(port)) for word in command]
    deadline = time.monotonic() + READY_TIMEOUT
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
    try:
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log_path.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the server did not start: {' '.join(command)}\n{end}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
