"""The verdicts and the clocks: gives each program a sandbox to itself, and believes only what it sees.

    Supervisor.test / run -> Stock (sandboxes already started) -> judge (compiles, tests) + prisoner (runs)
                          <- reports with a nonce, exit statuses, output files; silence is a failure

A sandbox goes back to the stock where all went well: each test ran in a fork of its own, which is gone.

A test's clock covers the load of the program before it, as in Open-Instruct, and not the queue. Whatever
goes wrong costs the program its sandboxes and that test; the next test gets new ones.
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
from verl.code_server.codec import encode
from verl.code_server.walls import Walls

WATCH_SECONDS = 0.02  # between two looks at the memory of running sandboxes
START_SECONDS = 10.0  # a sandbox that is not ready by then never will be
SHARED_BYTES = 8 << 20  # of each process, with the zygote
MANY_PROCESSES = 4  # of a sandbox: more than these run at the lowest priority
MANY_FAILURES = 20  # sandboxes in a row that did not start: none will
MAX_SHARED_CHARACTERS = 1 << 20  # of the inputs that go to one process, as messages
SPOILT = {"crashed", "memory", "output_limit"}  # outcomes after which a judge takes no other program
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class QueueFull(Exception):
    """More programs wait than the server takes."""


@dataclass
class Report:
    """What became of the tests, in order. runtimes: seconds by the server's clock, -1.0 where a test did not
    pass. outcomes: passed, failed, error:Type, timeout, memory, output_limit, opaque_value, crashed or
    program_error."""

    outcomes: list[str] = field(default_factory=list)
    runtimes: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: str, runtime: float) -> None:
        self.outcomes.append(outcome)
        self.runtimes.append(runtime if outcome == "passed" else -1.0)


class Sandbox:
    """One started sandbox, seen from outside. pid, pidfd: of its first process; with it all others end."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self.control = control
        self.pid = 0
        self.pidfd = -1
        self.used_since = 0.0
        self.ready = self.ended = self.over_memory = self.reusable = False

    def read(self) -> bytes | None:
        """The next message; None: there is none yet; b"": the sandbox has ended."""
        try:
            data, ancillary, _, _ = self.control.recvmsg(4096, 256)
        except BlockingIOError:
            return None
        except OSError:  # reset: it ended with messages unread
            return b""
        if self.pid == 0:
            sent_by = [part for _, kind, part in ancillary if kind == socket.SCM_CREDENTIALS]
            self.pid = struct.unpack("3i", sent_by[0][:12])[0] if sent_by and data else 0
            self.pidfd = os.pidfd_open(self.pid) if self.pid else -1
        return data

    async def receive(self, end: float) -> bytes:
        """As `read`, but waits until the monotonic clock says `end`. TimeoutError: no message by then."""
        while (data := self.read()) is None:
            await self.wait(end)
        return data

    async def wait(self, end: float) -> None:
        """Waits for a message until the monotonic clock says `end`. TimeoutError: none by then."""
        loop = asyncio.get_running_loop()
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        awake = asyncio.Event()
        loop.add_reader(self.control.fileno(), awake.set)
        timer = loop.call_later(left, awake.set)
        try:
            await awake.wait()
        finally:
            timer.cancel()
            loop.remove_reader(self.control.fileno())

    def is_ready(self) -> bool:
        """Whether it can take a program now, or has ended."""
        while not self.ready and (message := self.read()) is not None:
            self.ready = message in (b"ready", b"")
            self.ended = not message
        return self.ready

    def send(self, data: bytes, *fds: int) -> None:
        with suppress(OSError):  # it has just ended: `receive` will say so
            socket.send_fds(self.control, [data], fds)

    def memory_bytes(self) -> int:
        """Resident memory of its processes, less what each shares with the zygote. Where they are many, they
        get the lowest priority. It may take long: the last look at a dead process frees its memory."""
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
            except (OSError, ValueError):  # it has just ended
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
    """Sandboxes that are started before they are needed."""

    def __init__(self, walls: Walls, size: int) -> None:
        self.walls = walls
        self.size = size
        self.waiting: dict[bytes, list[Sandbox]] = {b"judge": [], b"prisoner": []}
        self.running: set[Sandbox] = set()

    def order(self, role: bytes) -> Sandbox:
        try:
            return Sandbox(self.walls.new_sandbox(role))
        except OSError:  # the zygote is gone
            self.walls.start()
            return Sandbox(self.walls.new_sandbox(role))

    @asynccontextmanager
    async def take(self, role: bytes) -> AsyncIterator[Sandbox]:
        """A sandbox for one program; killed afterwards unless it is made `reusable`."""
        waiting = self.waiting[role]
        for _ in range(MANY_FAILURES):
            while len(waiting) <= self.size:
                waiting.append(self.order(role))
            sandbox = next((one for one in waiting if one.is_ready()), waiting[0])
            waiting.remove(sandbox)
            with suppress(TimeoutError):
                while not sandbox.is_ready():
                    await sandbox.wait(time.monotonic() + START_SECONDS)
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
        """Kills sandboxes whose processes together hold too much memory; for as long as the server runs."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            since = time.monotonic() - WATCH_SECONDS
            for sandbox in [one for one in self.running if one.used_since < since]:
                used_since = sandbox.used_since
                held = await asyncio.to_thread(sandbox.memory_bytes)
                same = sandbox in self.running and sandbox.used_since == used_since and sandbox.pidfd >= 0
                if held > memory_bytes and same:
                    sandbox.over_memory = True
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for sandbox in [*self.running, *(one for some in self.waiting.values() for one in some)]:
            sandbox.kill()
        self.walls.close()


class Supervisor:
    """Tests and runs programs, `workers` at once; more wait in a queue of at most `max_queue`."""

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
        """What becomes of each test of a program; limit: seconds of each test with the load before it."""
        async with self.place():
            began = time.monotonic()
            report = Report()
            once = self.test_stdio if stdio else self.test_functions
            while len(report.outcomes) < len(tests):
                await once(program, tests, limit, report)
            report.seconds = time.monotonic() - began
            return report

    async def run(self, program: str, stdin: str, limit: float) -> tuple[str, str, float]:
        """(stdout with what stderr says, "passed" or what went wrong, seconds) of a program."""
        async with self.place():
            with memory_file() as code:
                outcome, left, _, _ = await self.compiled([[], program, True], limit, code)
                if outcome:
                    return "", outcome, 0.0
                async with self.prisoner(limit) as (sandbox, link):
                    run = await self.run_once(sandbox, link, code, stdin, left, b"e")
                    return run[1][: self.max_output].decode(errors="replace"), run[0], run[2]

    async def test_functions(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Goes on with the tests from where the report ends, in one judge and prisoner, while they last."""
        texts = [test if isinstance(test, str) else "raise TypeError('no text')" for test in tests]
        texts = texts[len(report.outcomes) :]
        async with self.prisoner(limit) as (prisoner, link), self.stock.take(b"judge") as judge:
            with memory_file() as code:
                lines, loaded, timeout = await self.judged(
                    judge, [texts, program, False], limit, code, link.fileno()
                )
            over = prisoner.over_memory or judge.over_memory
            for outcome, seconds, _ in lines:
                report.add("memory" if over and outcome == "crashed" else outcome, seconds)
            if timeout and len(lines) < len(texts):  # of the load itself: no test can do better
                for _ in range(1 if loaded or lines else len(texts)):
                    report.add("timeout", -1.0)
            elif not lines or over and len(lines) < len(texts) and lines[-1][0] != "crashed":
                report.add("memory" if over else "crashed", -1.0)
            else:  # what is left is tried again in a new sandbox
                prisoner.reusable = judge.reusable = len(lines) == len(texts)
            if {outcome for outcome, _, _ in lines} & SPOILT:
                judge.reusable = False

    async def judged(
        self, judge: Sandbox, job: list[Any], limit: float, code: int, *link: int
    ) -> tuple[list[tuple[str, float, str]], bool, bool]:
        """(outcome, seconds and output of each test that a judge has reported, is the program loaded, is the
        time of the next test over). The judge writes the program's code to the file `code`."""
        text = encode(job, lambda value: [None]).encode()
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
        lines = [(outcome, ends[i + 1] - ends[i], out) for i, (outcome, _, out) in enumerate(rows[loaded:])]
        return [line for line in lines if line[0] != "gone"], loaded, timeout

    async def test_stdio(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Goes on with the tests from where the report ends, in one sandbox, as far as it lasts."""
        pairs = [input_and_output(test) for test in tests[len(report.outcomes) :]]
        inputs = [pair[0] for pair in pairs if pair]
        several = len(pairs) > 1 and all(pairs) and sum(map(len, inputs)) < MAX_SHARED_CHARACTERS
        job = [inputs if several else [], program, True]
        async with self.prisoner(limit) as (sandbox, link):
            with memory_file() as code:
                problem, left, lines, timeout = await self.compiled(job, limit, code, link.fileno())
                for pair, (outcome, seconds, printed) in zip(pairs, lines, strict=False):
                    self.add_output(report, pair, outcome, json.loads(printed).encode("latin1"), seconds)
                if timeout:  # of a test that shared a process
                    return report.add("timeout", -1.0)
                for pair in pairs[len(lines) :]:
                    if pair is None:
                        report.add("error:TypeError", -1.0)
                    elif problem:
                        report.add(problem, -1.0)
                    else:
                        run = await self.run_once(sandbox, link, code, pair[0], left, b"r")
                        outcome, output, runtime, lasts = run
                        left = limit
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

    async def compiled(
        self, job: list[Any], limit: float, code: int, *link: int
    ) -> tuple[str, float, list[tuple[str, float, str]], bool]:
        """Writes a program's code to the file `code`: ("" or why there is none, seconds that are left of the
        limit, what became of the first tests, did the next one take too long): see judge.py."""
        began = time.monotonic()
        async with self.stock.take(b"judge") as judge:
            lines, loaded, timeout = await self.judged(judge, job, limit, code, *link)
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
        left = limit if lines else max(0.0, began + limit - time.monotonic())
        return problem, left, lines if loaded else [], loaded and timeout

    @asynccontextmanager
    async def prisoner(self, limit: float) -> AsyncIterator[tuple[Sandbox, socket.socket]]:
        """A sandbox for a program, and the link on which its tests go there."""
        async with self.stock.take(b"prisoner") as sandbox:
            link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with link:
                with theirs:
                    sandbox.send(cpu_seconds(limit), theirs.fileno())
                yield sandbox, link

    async def run_once(
        self, sandbox: Sandbox, link: socket.socket, code: int, stdin: str, limit: float, kind: bytes
    ) -> tuple[str, bytes, float, bool]:
        """(outcome, output, seconds, may the sandbox be used for the next test) of one run of a program."""
        cap = self.max_output
        with memory_file(stdin.encode(errors="surrogatepass")) as given, memory_file() as taken:
            began = time.monotonic()
            try:
                socket.send_fds(link, [kind], [code, given, taken])
                message = await sandbox.receive(began + limit)
            except TimeoutError:
                message = b"timeout"
            except OSError:
                message = b""
            runtime = time.monotonic() - began
            output = os.pread(taken, cap + 1, 0)
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
    """What a program reads in a test, and what it should print; None: the test is no such test."""
    given = test if isinstance(test, dict) else {}
    stdin = given.get("input")
    expected = given.get("output")
    if isinstance(stdin, list) and all(type(part) is str for part in stdin):
        stdin = "\n".join(stdin)
    return (stdin, expected) if isinstance(stdin, str) and isinstance(expected, str) else None


def cpu_seconds(limit: float) -> bytes:
    """What a test's process may take: the clock on the wall ends it before."""
    return str(int(limit) + 2).encode()


@contextmanager
def memory_file(data: bytes | None = None) -> Iterator[int]:
    """A file in memory; with data one that nobody can change, at its start."""
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
