"""The verdicts and the clocks of the code server.

The supervisor gives each program a sandbox to itself, and believes only what it sees.

    Supervisor.test / run -> Stock (sandboxes already started) -> judge (compiles, tests) + prisoner (runs)
                          <- reports with a nonce, exit statuses, output files; silence is a failure

A sandbox goes back to the stock if all went well. Each test ran in a fork of its own, which is gone.

A test's clock covers the load of the program before it, as in Open-Instruct, but not the queue. If anything
goes wrong, the program loses its sandboxes and that test. The next test gets new sandboxes.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from verl.code_server.answers import same_output
from verl.code_server.walls import Walls
from verl.code_server.wire import encode

WATCH_SECONDS = 0.02  # the time between two looks at the memory of running sandboxes
START_SECONDS = 10.0  # a sandbox that is not ready by then never will be
SHARED_BYTES = 8 << 20  # the memory that each process shares with the zygote
MANY_PROCESSES = 4  # if a sandbox has more processes than these, they run at the lowest priority
MAX_JUDGE_FAILURES = 3
MANY_FAILURES = 20  # if so many sandboxes in a row did not start, none will
MAX_SHARED_CHARACTERS = 1 << 20  # the limit of the inputs that go to one process, as messages
SPOILT = {"crashed", "memory", "output_limit"}  # the outcomes after which a judge takes no other program
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class QueueFull(Exception):
    """The error that more programs wait than the server takes."""


@dataclass
class Report:
    """A report on the tests of a program, in order.

    Attributes:
        outcomes: The outcome of each test: passed, failed, error:Type, timeout, memory, output_limit,
            crashed or program_error; or opaque_value and judge_failed, which are no verdicts.
        judged: For each test "inside" if its verdict was made in the program's process, else "outside".
        runtimes: The seconds of each test by the server's clock, or -1.0 if it did not pass.
        num_failures: The number of times that the judge itself has failed.
        seconds: The seconds of all tests together.
    """

    outcomes: list[str] = field(default_factory=list)
    runtimes: list[float] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    num_failures: int = 0
    seconds: float = 0.0

    def add(self, outcome: str, runtime: float, judged: str = "outside") -> None:
        self.outcomes.append(outcome)
        self.judged.append(judged)
        self.runtimes.append(runtime if outcome == "passed" else -1.0)


class Sandbox:
    """One started sandbox, seen from outside.

    Attributes:
        control: The socket to the sandbox.
        pid: The number of its first process. When that process ends, all others end with it.
        pidfd: The file of its first process, or -1.
        used_since: The time on the monotonic clock at which its present program got it.
        ready: Whether it can take a program, or has ended.
        ended: Whether it has ended.
        over_memory: Whether it was killed because of its memory.
        reusable: Whether it may go back to the stock.
    """

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self.control = control
        self.pid = 0
        self.pidfd = -1
        self.used_since = 0.0
        self.ready = self.ended = self.over_memory = self.reusable = False

    def read(self) -> bytes | None:
        """Return the next message, None if there is none yet, or b"" if the sandbox has ended."""
        try:
            data, ancillary, _, _ = self.control.recvmsg(4096, 256)
        except BlockingIOError:
            return None
        except OSError:  # the connection was reset, as the sandbox ended with messages unread
            return b""
        if self.pid == 0:
            sent_by = [credentials for _, kind, credentials in ancillary if kind == socket.SCM_CREDENTIALS]
            self.pid = struct.unpack("3i", sent_by[0][:12])[0] if sent_by and data else 0
            self.pidfd = os.pidfd_open(self.pid) if self.pid else -1
        return data

    async def receive(self, end: float) -> bytes:
        """Wait for the next message and return it as `read` does.

        Raises TimeoutError if there is no message before the monotonic clock says `end`.
        """
        while (data := self.read()) is None:
            await self.wait(end)
        return data

    async def wait(self, end: float) -> None:
        """Wait for a message until the monotonic clock says `end`, and then return without one.

        Raises TimeoutError if that time is already over at the call.
        """
        loop = asyncio.get_running_loop()
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        awake = asyncio.Event()
        loop.add_reader(self.control.fileno(), awake.set)
        timer = loop.call_later(remaining, awake.set)
        try:
            await awake.wait()
        finally:
            timer.cancel()
            loop.remove_reader(self.control.fileno())

    def is_ready(self) -> bool:
        """Return whether the sandbox can take a program now, or has ended."""
        while not self.ready and (message := self.read()) is not None:
            self.ready = message in (b"ready", b"")
            self.ended = not message
        return self.ready

    def send(self, data: bytes, *fds: int) -> None:
        with suppress(OSError):  # the sandbox has just ended, as `receive` will say
            socket.send_fds(self.control, [data], fds)

    def memory_bytes(self) -> int:
        """Return the resident memory of the processes, less the memory that each shares with the zygote.

        If there are many processes, they get the lowest priority. The call may take long, because the last
        look at a dead process frees its memory.
        """
        total = 0
        waiting = [self.pid]
        pids = []
        while waiting:
            pid = waiting.pop()
            try:
                with open(f"/proc/{pid}/statm") as file:
                    total += max(0, int(file.read().split()[1]) * PAGE_BYTES - SHARED_BYTES)
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        waiting.extend(int(child) for child in file.read().split())
            except (OSError, ValueError):  # the process has just ended
                continue
            pids.append(pid)
        for pid in pids[1:] if len(pids) > MANY_PROCESSES else []:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, 19)
        return total

    def kill(self) -> None:
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
        self.pidfd = -1
        self.control.close()


class Stock:
    """A stock of sandboxes, which are started before they are needed."""

    def __init__(self, walls: Walls, size: int) -> None:
        self.walls = walls
        self.size = size
        self.waiting: dict[bytes, list[Sandbox]] = {b"judge": [], b"prisoner": []}
        self.running: set[Sandbox] = set()

    def start_sandbox(self, role: bytes) -> Sandbox:
        try:
            return Sandbox(self.walls.new_sandbox(role))
        except OSError:  # the zygote is gone
            self.walls.start()
            return Sandbox(self.walls.new_sandbox(role))

    @asynccontextmanager
    async def take(self, role: bytes) -> AsyncIterator[Sandbox]:
        """Take a sandbox for one program.

        Afterwards the sandbox is killed unless it was made `reusable`.
        """
        waiting = self.waiting[role]
        for _ in range(MANY_FAILURES):
            while len(waiting) <= self.size:
                waiting.append(self.start_sandbox(role))
            sandbox = next((candidate for candidate in waiting if candidate.is_ready()), waiting[0])
            waiting.remove(sandbox)
            deadline = time.monotonic() + START_SECONDS
            with suppress(TimeoutError):
                while not sandbox.is_ready():
                    await sandbox.wait(deadline)
            if sandbox.ready and not sandbox.ended:
                break
            sandbox.kill()
        else:
            raise QueueFull("no sandbox can be started")
        sandbox.used_since = time.monotonic()
        sandbox.ready = False
        sandbox.reusable = False
        self.running.add(sandbox)
        try:
            yield sandbox
        finally:
            self.running.discard(sandbox)
            if sandbox.reusable and not sandbox.over_memory:
                waiting.append(sandbox)
            else:
                sandbox.kill()

    async def watch(self, memory_bytes: int) -> None:
        """Kill sandboxes whose processes together hold too much memory, for as long as the server runs."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            since = time.monotonic() - WATCH_SECONDS
            for sandbox in [candidate for candidate in self.running if candidate.used_since < since]:
                used_since = sandbox.used_since
                num_bytes = await asyncio.to_thread(sandbox.memory_bytes)
                is_same_use = (
                    sandbox in self.running and sandbox.used_since == used_since and sandbox.pidfd >= 0
                )
                if num_bytes > memory_bytes and is_same_use:
                    sandbox.over_memory = True
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for sandbox in [
            *self.running,
            *(sandbox for sandboxes in self.waiting.values() for sandbox in sandboxes),
        ]:
            sandbox.kill()
        self.walls.close()


class Supervisor:
    """A supervisor that tests and runs programs.

    `workers` programs run at once. Further ones wait in a queue of at most `max_queue`.
    """

    def __init__(self, walls: Walls, workers: int, max_queue: int = 1000) -> None:
        self.walls = walls
        self.workers = workers
        self.max_queue = max_queue
        self.stock = Stock(walls, min(workers, 4))
        self.free = asyncio.Semaphore(workers)
        self.max_output = int(walls.limits.output_mb * (1 << 20))
        self.queue = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        if self.queue >= self.max_queue:
            raise QueueFull
        self.queue += 1
        try:
            await self.free.acquire()
        finally:
            self.queue -= 1
        try:
            yield
        finally:
            self.free.release()

    async def test(self, program: str, tests: Sequence[Any], limit: float, stdio: bool) -> Report:
        """Test a program and return a report on its tests.

        Args:
            program: The text of the program.
            tests: The tests.
            limit: The seconds of each test, with the load of the program before it.
            stdio: Whether the tests compare standard output for a standard input.
        """
        async with self.place():
            began = time.monotonic()
            report = Report()
            once = self.test_stdio if stdio else self.test_functions
            while len(report.outcomes) < len(tests):
                await once(program, tests, limit, report)
            report.seconds = time.monotonic() - began
            return report

    async def run(self, program: str, stdin: str, limit: float) -> tuple[str, str, float]:
        """Run a program.

        Returns:
            The output on stdout and stderr, "passed" or what went wrong, and the seconds that it took.
        """
        async with self.place():
            with memory_file() as code:
                outcome, remaining, _, _ = await self.compile_and_run_first_tests(
                    [[], program, True], limit, code
                )
                if outcome:
                    return "", outcome, 0.0
                async with self.prisoner(limit) as (sandbox, link):
                    run = await self.run_once(sandbox, link, code, stdin, remaining, b"e")
                    return run[1][: self.max_output].decode(errors="replace"), run[0], run[2]

    async def test_functions(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Continue the tests from where the report ends, in one judge and prisoner, as long as they last."""
        texts = [test if isinstance(test, str) else "raise TypeError('no text')" for test in tests]
        texts = texts[len(report.outcomes) :]
        async with self.prisoner(limit) as (prisoner, link), self.stock.take(b"judge") as judge:
            with memory_file() as code:
                lines, loaded, timeout = await self.run_judge(
                    judge, [texts, program, False], limit, code, link.fileno()
                )
            over = prisoner.over_memory or judge.over_memory
            ending = lines.pop()[0] if lines and lines[-1][0] in ("gone", "judge_failed") else ""
            if not (lines or loaded or ending or over or timeout):
                ending = "judge_failed"  # it has ended before it read the program
            for outcome, seconds, where in lines:
                report.add(
                    "memory" if over and outcome == "crashed" else outcome, seconds, where or "outside"
                )
            # If the load itself takes too long, no test can do better.
            if timeout and len(lines) < len(texts):
                for _ in range(1 if loaded or lines else len(texts)):
                    report.add("timeout", -1.0)
            elif ending == "judge_failed":  # this says nothing about the program, which is tried again
                judge.reusable = False
                report.num_failures += 1
                if report.num_failures > MAX_JUDGE_FAILURES:
                    report.add("judge_failed", -1.0)
            elif not lines or over and len(lines) < len(texts) and lines[-1][0] != "crashed":
                report.add("memory" if over else "crashed", -1.0)
            else:  # the remaining tests are tried again in a new sandbox
                prisoner.reusable = judge.reusable = len(lines) == len(texts)
            if {outcome for outcome, _, _ in lines} & SPOILT:
                judge.reusable = False

    async def run_judge(
        self, judge: Sandbox, job: list[Any], limit: float, code: int, *link: int
    ) -> tuple[list[tuple[str, float, str]], bool, bool]:
        """Have a judge do a job, and read its reports.

        The judge writes the program's code to the file `code`.

        Returns:
            The outcome, seconds and output of each test that the judge has reported, whether the program is
            loaded, and whether the time of the next test is over.
        """
        text = encode(job).encode()
        with memory_file(text) as file, memory_file() as reports:
            began = time.monotonic()
            deadline = began + limit
            timeout = True
            judge.send(cpu_seconds(limit), file, code, reports, *link)
            while timeout:
                with suppress(TimeoutError):
                    await judge.receive(deadline)
                    timeout = False
                whole, _, _ = os.pread(reports, os.fstat(reports).st_size, 0).decode().rpartition("\n")
                rows = [line.split(" ", 2) for line in whole.split("\n") if line]
                loaded = bool(rows) and rows[0][0] == "loaded"
                ends = [began, *(float(end) for _, end, _ in rows[loaded:])]
                deadline = ends[-1] + limit
                if time.monotonic() >= deadline:
                    break
        lines = [
            (outcome, ends[index + 1] - ends[index], out)
            for index, (outcome, _, out) in enumerate(rows[loaded:])
        ]
        return lines, loaded, timeout

    async def test_stdio(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Continue the tests from where the report ends, in one sandbox, as long as it lasts."""
        pairs = [input_and_output(test) for test in tests[len(report.outcomes) :]]
        inputs = [pair[0] for pair in pairs if pair]
        several = len(pairs) > 1 and all(pairs) and sum(map(len, inputs)) < MAX_SHARED_CHARACTERS
        job = [inputs if several else [], program, True]
        async with self.prisoner(limit) as (sandbox, link):
            with memory_file() as code:
                problem, remaining, lines, timeout = await self.compile_and_run_first_tests(
                    job, limit, code, link.fileno()
                )
                for pair, (outcome, seconds, printed) in zip(pairs, lines, strict=False):
                    self.add_output(report, pair, outcome, json.loads(printed).encode("latin1"), seconds)
                if timeout:  # a test that shared a process took too long
                    return report.add("timeout", -1.0)
                for pair in pairs[len(lines) :]:
                    if pair is None:
                        report.add("error:TypeError", -1.0)
                    elif problem:
                        report.add(problem, -1.0)
                    else:
                        run = await self.run_once(sandbox, link, code, pair[0], remaining, b"r")
                        outcome, output, runtime, lasts = run
                        remaining = limit
                        self.add_output(report, pair, outcome, output, runtime)
                        if not lasts:
                            return
                sandbox.reusable = True

    def add_output(
        self, report: Report, pair: tuple[str, str] | None, outcome: str, output: bytes, seconds: float
    ) -> None:
        if outcome == "passed" and len(output) > self.max_output:
            outcome = "output_limit"
        if outcome == "passed" and not (pair and same_output(output.decode(errors="replace"), pair[1])):
            outcome = "failed"
        report.add(outcome, seconds)

    async def compile_and_run_first_tests(
        self, job: list[Any], limit: float, code: int, *link: int
    ) -> tuple[str, float, list[tuple[str, float, str]], bool]:
        """Have a judge compile a program to the file `code`, and run its first tests (see judge.py).

        Returns:
            "" or the reason why there is no code, the seconds that are left of the limit, the lines of the
            first tests as from `run_judge`, and whether the next test took too long.
        """
        began = time.monotonic()
        async with self.stock.take(b"judge") as judge:
            lines, loaded, timeout = await self.run_judge(judge, job, limit, code, *link)
            judge.reusable = loaded and not timeout
        fcntl.fcntl(code, fcntl.F_ADD_SEALS, SEALS)
        if loaded:
            problem = ""
        elif lines:
            problem = lines[0][0]
        elif timeout:
            problem = "timeout"
        elif judge.over_memory:
            problem = "memory"
        else:
            problem = "crashed"
        remaining = limit if lines else max(0.0, began + limit - time.monotonic())
        return problem, remaining, lines if loaded else [], loaded and timeout

    @asynccontextmanager
    async def prisoner(self, limit: float) -> AsyncIterator[tuple[Sandbox, socket.socket]]:
        """Take a sandbox for a program, and open the link on which its tests go there."""
        async with self.stock.take(b"prisoner") as sandbox:
            link, prisoner_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with link:
                with prisoner_end:
                    sandbox.send(cpu_seconds(limit), prisoner_end.fileno())
                yield sandbox, link

    async def run_once(
        self, sandbox: Sandbox, link: socket.socket, code: int, stdin: str, limit: float, kind: bytes
    ) -> tuple[str, bytes, float, bool]:
        """Run a program once.

        Returns:
            The outcome, the output, the seconds, and whether the sandbox may be used for the next test.
        """
        cap = self.max_output
        with memory_file(stdin.encode(errors="surrogatepass")) as stdin_file, memory_file() as stdout_file:
            began = time.monotonic()
            try:
                socket.send_fds(link, [kind], [code, stdin_file, stdout_file])
                message = await sandbox.receive(began + limit)
            except TimeoutError:
                message = b"timeout"
            except OSError:
                message = b""
            runtime = time.monotonic() - began
            output = os.pread(stdout_file, cap + 1, 0)
        status = int.from_bytes(message[:4], "little")
        if message == b"timeout":
            outcome = "timeout"
        elif sandbox.over_memory:
            outcome = "memory"
        elif len(output) > cap:
            outcome = "output_limit"
        elif len(message) != 5 or os.WIFSIGNALED(status):
            outcome = "crashed"
        else:
            outcome = {0: "passed", 3: "memory"}.get(os.WEXITSTATUS(status), "program_error")
        return outcome, output, runtime, message[4:] == b"c" and not sandbox.over_memory


def input_and_output(test: Any) -> tuple[str, str] | None:
    """Return the input of a test and the expected output, or None if the test has another shape."""
    content = test if isinstance(test, dict) else {}
    stdin = content.get("input")
    expected = content.get("output")
    if isinstance(stdin, list) and all(type(line) is str for line in stdin):
        stdin = "\n".join(stdin)
    return (stdin, expected) if isinstance(stdin, str) and isinstance(expected, str) else None


def cpu_seconds(limit: float) -> bytes:
    """Return the limit of CPU time of a test's process.

    The wall clock ends the process before that.
    """
    return str(int(limit) + 2).encode()


@contextmanager
def memory_file(data: bytes | None = None) -> Iterator[int]:
    """Open a file in memory.

    With `data` nobody can change the file, and it is read from its start.
    """
    file = os.memfd_create("job", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        if data is not None:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.lseek(file, 0, 0)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        yield file
    finally:
        os.close(file)
