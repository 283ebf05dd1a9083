"""Asks code servers, or one of its own. Environments and verifiers run programs through this alone.

    CodeClient(url).test(program, tests, stdio, limit) -> [1, 0, ..]     CouldNotVerify: nobody knows
    CodeClient(url).run(program, stdin, limit) -> (stdout, outcome)

A server may be any with Open-Instruct's API. Without an address (nor CODE_API_URL in the environment) each
process starts one server of its own at the first program; it ends with the process, however that ends.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from verl.verifiers.base import CouldNotVerify

URL_VARIABLE = "CODE_API_URL"
QUEUE_SECONDS = 300.0  # that a program may wait for its turn, beside what its tests may take
START_SECONDS = 60.0
PATHS = ("/test_program_stdio", "/test_program")
JSON = {"Content-Type": "application/json"}
TRY_AGAIN = (429, 500, 502, 503, 504)


class CodeClient:
    """Threads may share it. It pickles as its configuration: each process has its own connections and server.

    Args:
        url: one address or several with commas between; Open-Instruct's `.../test_program` too. None: what
            CODE_API_URL says, else a server of its own.
        queue_seconds: that a program may wait at a server before it is "could not verify".
    """

    def __init__(self, url: str | None = None, queue_seconds: float = QUEUE_SECONDS) -> None:
        self.queue_seconds = queue_seconds
        self.urls = [
            short for one in (url or os.environ.get(URL_VARIABLE) or "").split(",") if (short := base_of(one))
        ]
        self._turn = itertools.count(random.randrange(1 << 16))
        self._lock = threading.Lock()
        self._http: tuple[int, httpx.Client] | None = None  # of which process

    def __getstate__(self) -> dict[str, Any]:
        return {"url": ",".join(self.urls), "queue_seconds": self.queue_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"] or None, state["queue_seconds"])  # type: ignore[misc]

    def test(
        self, program: str, tests: Sequence[Any] | str, stdio: bool = False, limit: float = 1.0
    ) -> list[int]:
        """1 for each test that the program passes, else 0."""
        return self.test_timed(program, tests, stdio, limit)[0]

    def test_timed(
        self, program: str, tests: Sequence[Any] | str, stdio: bool = False, limit: float = 1.0
    ) -> tuple[list[int], list[float]]:
        """(1 or 0 per test, seconds per test or -1.0 where it did not pass).

        Args:
            tests: texts of asserts, or {"input", "output"} with `stdio`; or Open-Instruct's packed text.
            limit: seconds for the load of the program and for each test.

        Raises:
            CouldNotVerify: no server gave an answer in time.
        """
        number = len(tests) if not isinstance(tests, str) else None
        if number == 0:
            return [], []
        body = {"program": program, "tests": tests, "max_execution_time": limit}
        # packed tests: their number is unknown here; no list of a dataset takes longer than 100
        reply = self._ask(PATHS[0] if stdio else PATHS[1], body, limit * (1 + (number or 100)), number)
        return [int(result) for result in reply["results"]], [float(seconds) for seconds in reply["runtimes"]]

    def run(self, program: str, stdin: str = "", limit: float = 1.0) -> tuple[str, str]:
        """(what the program prints, "passed" or what went wrong, as in the server's outcomes).

        Raises:
            CouldNotVerify: no server gave an answer in time.
        """
        body = {"program": program, "stdin": stdin, "max_execution_time": limit}
        reply = self._ask("/run", body, limit, None)
        return reply["stdout"], reply["outcome"]

    def _ask(self, path: str, body: dict[str, Any], seconds: float, number: int | None) -> dict[str, Any]:
        """The reply of the first server that gives a whole one; tries again until the deadline."""
        deadline = time.monotonic() + seconds + self.queue_seconds
        pause, reason = 0.1, "no time"
        content = json.dumps(body)  # in ASCII: half a surrogate pair can't be sent otherwise
        while (left := deadline - time.monotonic()) > 0:
            urls = self.urls or [own_server().url]
            url = urls[next(self._turn) % len(urls)]
            wait = pause = min(2 * pause, 5.0)
            try:
                answer = self._client().post(
                    url + path, content=content, headers=JSON, timeout=httpx.Timeout(left, connect=10.0)
                )
                if answer.status_code == 200:
                    reply = answer.json()
                    if path == "/run" and is_run(reply) or path != "/run" and is_graded(reply, number):
                        return reply
                    reason = "a reply of another shape"
                elif answer.status_code in TRY_AGAIN:
                    reason = f"status {answer.status_code}"
                    wait = min(30.0, float(answer.headers.get("retry-after", wait)))
                else:
                    raise CouldNotVerify(
                        f"code server {url}: status {answer.status_code}: {answer.text[:300]}"
                    )
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
                reason = f"{type(error).__name__}: {error}"
            time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
        raise CouldNotVerify(
            f"code server {', '.join(self.urls) or 'of its own'}: {reason} in {seconds:.0f} s + queue"
        )

    def _client(self) -> httpx.Client:
        with self._lock:
            if self._http is None or self._http[0] != os.getpid():
                limits = httpx.Limits(
                    max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0
                )
                self._http = (os.getpid(), httpx.Client(limits=limits, trust_env=False))
            return self._http[1]

    def close(self) -> None:
        """Ends its connections; the server of its own goes on for the process's other clients."""
        with self._lock:
            if self._http is not None and self._http[0] == os.getpid():
                self._http[1].close()
            self._http = None


def base_of(url: str) -> str:
    url = url.strip().rstrip("/")
    for path in PATHS:
        url = url.removesuffix(path)
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"code server: found the address {url!r}, expected http://host:port")
    return url


def is_run(reply: Any) -> bool:
    return isinstance(reply, dict) and all(isinstance(reply.get(name), str) for name in ("stdout", "outcome"))


def is_graded(reply: Any, number: int | None) -> bool:
    """Whether a reply has a 0 or 1 and a time for each test."""
    results, runtimes = (
        (reply.get(name) for name in ("results", "runtimes")) if isinstance(reply, dict) else ("", "")
    )
    return (
        isinstance(results, list)
        and isinstance(runtimes, list)
        and len(results) == len(runtimes)
        and (number is None or len(results) == number)
        and all(type(result) in (int, bool) and result in (0, 1) for result in results)
        and all(type(seconds) in (int, float) and math.isfinite(seconds) for seconds in runtimes)
    )


# -------------------------------------------------------------------------------- a server of its own
class OwnServer:
    """A code server of this process. It listens on a socket that this process opened, and ends when the pipe
    to its stdin is closed: with `close`, or as this process is gone."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.process_id, self.url = os.getpid(), f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "verl.code_server",
            "--fd",
            str(listener.fileno()),
        ]
        with tempfile.TemporaryFile() as log, listener:
            self.process = subprocess.Popen(
                [*command, "--until_stdin_closes", "--allow_packages", "numpy"],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + START_SECONDS
            while not self.answers():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    log.seek(0)
                    raise CouldNotVerify(
                        f"a code server did not start: {log.read().decode(errors='replace')[-3000:]}"
                    )
                time.sleep(0.05)

    def answers(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=1.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        if self.process_id == os.getpid():
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_own: OwnServer | None = None
_own_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_own=None, _own_lock=threading.Lock()))


def own_server() -> OwnServer:
    """This process's server, started where there is none or it has died."""
    global _own
    with _own_lock:
        if _own is None or _own.process.poll() is not None:
            _own = OwnServer()
            atexit.register(_own.close)
        return _own
