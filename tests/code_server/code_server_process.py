"""A code server of one's own for tests and the benchmark, over HTTP as a user has it."""

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

REPO = Path(__file__).resolve().parents[2]
OURS = [sys.executable, "-m", "verl.code_server", "--host", "127.0.0.1", "--port", "{port}"]


@contextlib.contextmanager
def running(
    command: list[str],
    environment: dict[str, str] | None = None,
    cwd: Path = REPO,
    log: Path = Path(os.devnull),
) -> Iterator[tuple[httpx.Client, int]]:
    """(client, process id) of the server of `command` while the block runs; "{port}" becomes a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in command]
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, cwd=cwd, stdout=out, stderr=out)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits, trust_env=False
    ) as client:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                assert process.poll() is None, f"the server ended with {process.returncode}: see {log}"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
            yield client, process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def ask(client: httpx.Client, program: str, tests: object, limit: float = 1.0, stdio: bool = False) -> dict:
    """The reply of the server to one program with its tests; anything but a 200 is an AssertionError."""
    path = "/test_program_stdio" if stdio else "/test_program"
    body = {"program": program, "tests": tests, "max_execution_time": limit, "detail": True}
    reply = client.post(path, json=body)
    assert reply.status_code == 200, f"{reply.status_code} {reply.text[:500]}"
    return reply.json()
