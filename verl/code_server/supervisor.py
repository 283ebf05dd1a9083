"""The verdicts and the clocks: gives each program sandboxes of its own, and believes only what it sees.

    Supervisor.test / run -> Stock (sandboxes already started) -> judge + prisoner, or a stdio prisoner
                          <- reports with a nonce, exit statuses, output files; silence is a failure

A test's clock covers the load of the program before it, as in Open-Instruct, and not the queue. Whatever
goes wrong costs the program its sandboxes and that test; the next test gets new ones.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from verl.code_server.answers import same_output
from verl.code_server.codec import encode
from verl.code_server.walls import Walls

WATCH_SECONDS = 0.02  # between two looks at the memory of running sandboxes
START_SECONDS = 10.0  # a sandbox that is not ready by then never will be
SHARED_BYTES = 8 << 20  # of each process, with the zygote
MANY_PROCESSES = 4  # of a sandbox: more than these run at the lowest priority
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
        self.pid, self.pidfd = 0, -1
        self.used_since = 0.0
        self.over_memory = False

    async def receive(self, seconds: float) -> bytes:
        """The next message; b"": the sandbox has ended. TimeoutError: none in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            try:
                data, ancillary, _, _ = self.control.recvmsg(4096, 256)
                if self.pid == 0:
                    sent_by = [part for _, kind, part in ancillary if kind == socket.SCM_CREDENTIALS]
                    self.pid = struct.unpack("3i", sent_by[0][:12])[0] if sent_by and data else 0
                    self.pidfd = os.pidfd_open(self.pid) if self.pid else -1
                return data
            except BlockingIOError:
                if loop.time() >= end:
                    raise TimeoutError from None
            except OSError:  # reset: it ended with messages unread
                return b""
            awake: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self.control.fileno(), wake, awake)
            timer = loop.call_at(end, wake, awake)
            try:
                await awake
            finally:
                timer.cancel()
                loop.remove_reader(self.control.fileno())

    def send_job(self, job: Any, cpu_seconds: float, *more: socket.socket) -> None:
        """Hands over what to do, in a sealed file in memory."""
        file = sealed_file(encode(job, lambda value: [None]).encode())
        try:
            data = str(int(cpu_seconds) + 2).encode()
            with suppress(OSError):  # it has just ended: `receive` will say so
                socket.send_fds(self.control, [data], [file, *(one.fileno() for one in more)])
        finally:
            os.close(file)
            for one in more:
                one.close()

    def memory_bytes(self, shared: int) -> tuple[int, list[int]]:
        """(resident memory of its processes, less what each shares with the zygote; their ids)."""
        total, waiting, pids = 0, [self.pid], []
        while waiting:
            pid = waiting.pop()
            pids.append(pid)
            try:
                with open(f"/proc/{pid}/statm") as file:
                    total += max(0, int(file.read().split()[1]) * PAGE_BYTES - shared)
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        waiting.extend(int(child) for child in file.read().split())
            except (OSError, ValueError):  # it has just ended
                continue
        return total, pids

    def kill(self) -> None:
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
        self.pidfd = -1
        self.control.close()


def wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Stock:
    """Sandboxes that are started before they are needed; each is used once."""

    def __init__(self, walls: Walls, size: int) -> None:
        self.walls, self.size = walls, size
        self.ready: dict[bytes, list[Sandbox]] = {b"judge": [], b"functions": [], b"stdio": []}
        self.running: set[Sandbox] = set()

    def order(self, role: bytes) -> Sandbox:
        try:
            return Sandbox(self.walls.new_sandbox(role))
        except OSError:  # the zygote is gone
            self.walls.start()
            return Sandbox(self.walls.new_sandbox(role))

    @asynccontextmanager
    async def take(self, role: bytes) -> AsyncIterator[Sandbox]:
        """A sandbox for one program; killed afterwards."""
        while True:
            waiting = self.ready[role]
            sandbox = waiting.pop(0) if waiting else self.order(role)
            while len(waiting) < self.size:
                waiting.append(self.order(role))
            try:
                if await sandbox.receive(START_SECONDS) == b"ready" and sandbox.pid:
                    break
            except TimeoutError:
                pass
            sandbox.kill()
        sandbox.used_since = time.monotonic()
        self.running.add(sandbox)
        try:
            yield sandbox
        finally:
            self.running.discard(sandbox)
            sandbox.kill()

    async def watch(self, memory_bytes: int) -> None:
        """Kills sandboxes whose processes together hold too much memory; for as long as the server runs."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            since = time.monotonic() - WATCH_SECONDS
            for sandbox in [one for one in self.running if one.used_since < since]:
                held, pids = sandbox.memory_bytes(SHARED_BYTES)
                for pid in pids if len(pids) > MANY_PROCESSES else []:  # they leave the others their share
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, pid, 19)
                if held > memory_bytes:
                    sandbox.over_memory = True
                    if sandbox.pidfd >= 0:
                        signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for sandbox in [*self.running, *(one for some in self.ready.values() for one in some)]:
            sandbox.kill()
        self.walls.close()


class Supervisor:
    """Tests and runs programs, `workers` at once; more wait in a queue of at most `max_queue`."""

    def __init__(self, walls: Walls, workers: int, max_queue: int = 1000) -> None:
        self.walls, self.workers, self.max_queue = walls, workers, max_queue
        self.stock = Stock(walls, min(workers, 4))
        self.free = asyncio.Semaphore(workers)
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
            began, report = time.monotonic(), Report()
            once = self.test_stdio if stdio else self.test_functions
            while len(report.outcomes) < len(tests):
                await once(program, tests, limit, report)
            report.seconds = time.monotonic() - began
            return report

    async def run(self, program: str, stdin: str, limit: float) -> tuple[str, str, float]:
        """(stdout with what stderr says, "passed" or what went wrong, seconds) of a program."""
        async with self.place(), self.stock.take(b"stdio") as sandbox:
            sandbox.send_job(program, limit)
            outcome, output, runtime, _ = await self.run_once(sandbox, stdin, limit, b"e")
            return output, outcome, runtime

    async def test_functions(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Goes on with the tests from where the report ends, in one judge and prisoner, while they last."""
        first = index = len(report.outcomes)
        texts = [test if isinstance(test, str) else "raise TypeError('no text')" for test in tests[first:]]
        async with self.stock.take(b"functions") as prisoner, self.stock.take(b"judge") as judge:
            theirs, judges = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            nonce, cpu = secrets.token_hex(16), limit * (len(texts) + 1)
            prisoner.send_job(program, cpu, theirs)
            judge.send_job([nonce, first, texts], cpu, judges)
            loaded, began = False, time.monotonic()
            while index < len(tests):
                try:
                    message = await judge.receive(began + limit - time.monotonic())
                except TimeoutError:
                    whole = not loaded and index == first  # the load itself: no test can do better
                    for _ in range(len(tests) - index if whole else 1):
                        report.add("timeout", -1.0)
                    return
                now = time.monotonic()
                sent_by, number, outcome = (*message.decode("ascii", "replace").split(" "), "", "", "")[:3]
                gone = sent_by != nonce or not number.isdigit() or int(number) != index or outcome == "gone"
                over = prisoner.over_memory or judge.over_memory
                if gone and (over or index == first):  # else the test is tried again in a new sandbox
                    report.add("memory" if over else "crashed", -1.0)
                if gone:
                    return
                if outcome == "loaded":
                    loaded = True
                    continue
                report.add("memory" if over else outcome, now - began)
                began, index = now, index + 1

    async def test_stdio(self, program: str, tests: Sequence[Any], limit: float, report: Report) -> None:
        """Goes on with the tests from where the report ends, in one sandbox, as far as it lasts."""
        left = tests[len(report.outcomes) :]
        async with self.stock.take(b"stdio") as sandbox:
            sandbox.send_job(program, limit * len(left))
            for test in left:
                stdin, expected = (
                    (test.get("input"), test.get("output")) if isinstance(test, dict) else (None, None)
                )
                stdin = (
                    "\n".join(stdin)
                    if isinstance(stdin, list) and all(type(s) is str for s in stdin)
                    else stdin
                )
                if not isinstance(stdin, str) or not isinstance(expected, str):
                    report.add("error:TypeError", -1.0)
                    continue
                outcome, output, runtime, lasts = await self.run_once(sandbox, stdin, limit, b"r")
                if outcome == "passed" and not same_output(output, expected):
                    outcome = "failed"
                report.add(outcome, runtime)
                if not lasts:
                    return

    async def run_once(
        self, sandbox: Sandbox, stdin: str, limit: float, kind: bytes
    ) -> tuple[str, str, float, bool]:
        """(outcome, output, seconds, may the sandbox be used for the next test) of one run of its program."""
        cap = int(self.walls.limits.output_mb * (1 << 20))
        given, taken = sealed_file(stdin.encode(errors="surrogatepass")), os.memfd_create("stdout")
        try:
            began = time.monotonic()
            try:
                socket.send_fds(sandbox.control, [kind], [given, taken])
                message = await sandbox.receive(limit)
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
            return outcome, output[:cap].decode(errors="replace"), runtime, message[4:] == b"c"
        finally:
            os.close(given)
            os.close(taken)


def sealed_file(data: bytes) -> int:
    """A file in memory that nobody can change; at its start."""
    file = os.memfd_create("job", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file
