"""The client of the code server.

Environments and verifiers run programs through this module alone.

    CodeClient(url).test(program, tests, stdio, limit) -> Results(passed=[1, 0, ..], ..)
    CodeClient(url).run(program, stdin, limit) -> (stdout, outcome)

Both raise CouldNotVerify if no server answers, and `test` also if the server could not judge a test. Any
server with Open-Instruct's API will do. Without an address, and without CODE_API_URL in the environment, each
process starts one server of its own at the first program. That server ends with the process, however the
process ends.
"""

import atexit
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

import httpx

from verl.utils.errors import CouldNotVerify

URL_VARIABLE = "CODE_API_URL"
QUEUE_SECONDS = 300.0  # the time that a program may wait for its turn, in addition to the time of its tests
START_SECONDS = 60.0
UNJUDGED = ("opaque_value", "judge_failed")  # the outcomes that are no verdicts
TRY_AGAIN = (429, 500, 502, 503, 504)
# The errors that a reply of another shape raises.
MALFORMED_REPLY_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

Read = TypeVar("Read")
_turns = itertools.count(os.getpid())  # processes start at different servers


@dataclass(frozen=True)
class Results:
    """The results of a program's tests.

    Attributes:
        passed: 1 or 0 for each test.
        seconds: The seconds of each test, which are -1.0 if it did not pass.
        num_inside: The number of tests that were judged in the program's own process.
        num_unjudged: The number of tests that the server could not judge.
    """

    passed: list[int]
    seconds: list[float]
    num_inside: int = 0
    num_unjudged: int = 0


class CodeClient:
    """A client of one or several code servers, which threads and processes may share.

    Its methods raise CouldNotVerify if no server gives an answer in time.

    Args:
        url: One address, or several with commas between. Open-Instruct's `.../test_program` will do, too.
            None for the address in CODE_API_URL, or else for a server of this process's own.
        queue_seconds: The seconds that a program may wait for its turn at a server. After that the methods
            raise CouldNotVerify.
    """

    def __init__(self, url: str | None = None, queue_seconds: float = QUEUE_SECONDS) -> None:
        addresses = (url or os.environ.get(URL_VARIABLE) or "").split(",")
        bases = [re.sub(r"(/test_program(_stdio)?)?/*$", "", address.strip()) for address in addresses]
        self.urls = [base for base in bases if base]
        self.queue_seconds = queue_seconds
        for base in self.urls:
            if not base.startswith(("http://", "https://")):
                raise ValueError(f"code server: found the address {base!r}, expected http://host:port")

    def test(
        self, program: str, tests: Sequence[Any] | str, stdio: bool = False, limit: float = 1.0
    ) -> Results:
        """Test a program, and return which tests passed and how long each took.

        Args:
            program: The text of the program.
            tests: Texts of asserts, {"input", "output"} with `stdio`, or Open-Instruct's packed text.
            stdio: Whether the tests compare standard output for a standard input.
            limit: The seconds for the load of the program and for each test.

        Raises:
            CouldNotVerify: If no server answers, or if the server could not judge a test.
        """
        number = None if isinstance(tests, str) else len(tests)
        if number == 0:
            return Results([], [])
        path = "/test_program_stdio" if stdio else "/test_program"
        body = {"program": program, "tests": tests, "max_execution_time": limit, "detail": True}
        # The number of packed tests is unknown here. No list of a dataset takes longer than 100 tests.
        seconds = limit * (1 + (number or 100)) + self.queue_seconds
        results = ask(self.urls, path, body, seconds, lambda reply: read_results(reply, number))
        if results.num_unjudged:
            raise CouldNotVerify(f"{results.num_unjudged} of {len(results.passed)} tests could not be judged")
        return results

    def run(self, program: str, stdin: str = "", limit: float = 1.0) -> tuple[str, str]:
        """Run a program, and return its standard output and its outcome.

        The outcome is "passed" or says what went wrong, as in the server's outcomes.
        """
        body = {"program": program, "stdin": stdin, "max_execution_time": limit}
        return ask(self.urls, "/run", body, limit + self.queue_seconds, itemgetter("stdout", "outcome"))


def read_results(reply: Any, number: int | None) -> Results:
    """Return the results of a reply. A server of others does not say how it has judged.

    Raises any of `MALFORMED_REPLY_ERRORS` if the reply does not have one of both for each test.
    """
    results = reply["results"]
    runtimes = reply["runtimes"]
    if (
        not len(results) == len(runtimes) == (len(results) if number is None else number)
        or not all(type(result) in (int, bool) and result in (0, 1) for result in results)
        or not all(map(math.isfinite, runtimes))
    ):
        raise ValueError("a reply of another shape")
    outcomes = reply.get("outcomes", [])
    return Results(
        list(map(int, results)),
        list(map(float, runtimes)),
        num_inside=list(reply.get("judged", [])).count("inside"),
        num_unjudged=sum(outcome in UNJUDGED for outcome in outcomes),
    )


def ask(urls: Sequence[str], path: str, body: Any, seconds: float, read: Callable[[Any], Read]) -> Read:
    """Send a request to code servers until one gives a whole reply, and return what `read` makes of it.

    The servers are asked one after the other until the time is up.

    Args:
        urls: The addresses of the servers. If there are none, the process's own code server is asked.
        path: The path of the request.
        body: The body of the request, which is sent as JSON.
        seconds: The time after which to give up.
        read: Takes the reply. It may raise any of `MALFORMED_REPLY_ERRORS` for a reply of another shape.

    Raises:
        CouldNotVerify: If no server gave an answer in time, or if one refused the request.
    """
    deadline = time.monotonic() + seconds
    pause = 0.1
    reason = "no time"
    url = ""
    content = json.dumps(body)  # in ASCII, because half a surrogate pair can't be sent otherwise
    while (remaining := deadline - time.monotonic()) > 0:
        bases = urls or [own_server().url]
        url = bases[next(_turns) % len(bases)] + path
        wait = pause = min(2 * pause, 5.0)
        try:
            timeout = httpx.Timeout(remaining, connect=min(remaining, 10.0))
            answer = connections().post(url, content=content, timeout=timeout)
            if answer.status_code == 200:
                return read(answer.json())
            reason = f"status {answer.status_code}"
            if answer.status_code not in TRY_AGAIN:
                raise CouldNotVerify(f"{url}: {reason}: {answer.text[:300]}")
            wait = min(30.0, float(answer.headers.get("retry-after", wait)))
        except (httpx.HTTPError, httpx.InvalidURL, *MALFORMED_REPLY_ERRORS) as error:
            reason = f"{type(error).__name__}: {error}"
        time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
    raise CouldNotVerify(f"{url} did not answer in {seconds:.0f} s: {reason}")


@cache
def connections() -> httpx.Client:
    """Return this process's connections.

    Unused ones are closed before uvicorn closes its end.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
    return httpx.Client(headers={"Content-Type": "application/json"}, limits=limits, trust_env=False)


# -------------------------------------------------------------------------------- a server of its own
class OwnServer:
    """A code server of this process.

    It listens on a socket that this process has opened. It ends when the pipe to its stdin is closed, which
    happens in `close` or when this process is gone.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "verl.code_server", "--until_stdin_closes"]
        with tempfile.TemporaryFile() as log:
            with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                number = listener.fileno()
                self.process = subprocess.Popen(
                    [*command, "--fd", str(number), "--allow_packages", "numpy"],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[number], start_new_session=True,
                )  # fmt: skip
            try:  # The socket now belongs to the server alone, so this request fails if the server ends.
                reply = httpx.get(f"{self.url}/health", timeout=START_SECONDS, trust_env=False)
                reply.raise_for_status()
            except httpx.HTTPError as error:
                self.close()
                log.seek(0)
                text = log.read().decode(errors="replace")[-3000:]
                raise CouldNotVerify(f"a code server did not start: {text}") from error

    def close(self) -> None:
        try:
            self.process.communicate(timeout=5.0)  # this closes its stdin
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_own: OwnServer | None = None
_own_lock = threading.Lock()


def own_server() -> OwnServer:
    """Return this process's server, which is started if there is none or if it has died."""
    global _own
    with _own_lock:
        if _own is None or _own.process.poll() is not None:
            _own = OwnServer()
            atexit.register(_own.close)
        return _own


# In a fork the server and the connections belong to the parent.
os.register_at_fork(after_in_child=lambda: globals().update(_own=None, _own_lock=threading.Lock()))
os.register_at_fork(after_in_child=connections.cache_clear)
