"""Checks of a policy's text in processes that can be killed: `9^(9^(9^9))` costs only its own row.

A process counts its own processor time, from when a call begins, and the kernel ends it there (SIGPROF), in
whatever C code it is. A busy machine thus makes no false zero, as waiting costs nothing. Memory is bounded.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.verifiers.base import CouldNotVerify, Verdict

_MEMORY_BYTES = 4 << 30  # of a process's address space
_BLAME = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE}  # C code that the text has led astray


class CheckWorkers:
    """Processes that call one function; started when they are first needed, ended by `close`.

    Args:
        function: module:function, called with JSON values; returns a score. first: arguments of a call before
            the first one, without a clock, for what is imported late.
        cpu_seconds: processor time that one call may take.
    """

    def __init__(self, function: str, cpu_seconds: float, first: Sequence[Any]) -> None:
        self.function, self.cpu_seconds, self.first = function, cpu_seconds, first
        self.wall_seconds = max(60.0, 20 * cpu_seconds)  # a machine that is this busy can't verify
        self._idle: list[subprocess.Popen[bytes]] = []

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Verdict]:
        """The verdict of each call, in order. Too much time or memory: 0 with `timed_out`; a process that
        ended for another reason twice: no score. CouldNotVerify: no process can be started.
        """

        def verdict(call: Sequence[Any]) -> Verdict:
            for _ in range(2):
                process = self._idle.pop() if self._idle else self._start()
                made = self._ask(process, call)
                if process.poll() is None:
                    self._idle.append(process)
                if made.score is not None:
                    break
            return made

        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "check") as pool:
            return list(pool.map(verdict, calls))

    def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            _end(self._idle.pop(), 0)

    def _start(self) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.path[:] = {sys.path!r}; from verl.verifiers.workers import serve; serve()"
        command = [sys.executable, "-c", code, self.function, str(self.cpu_seconds), json.dumps(self.first)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, 0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        if not _line(process, 120):  # it says when it is ready
            raise CouldNotVerify(f"the checking process can't start (status {_end(process, 1)})")
        return process

    def _ask(self, process: subprocess.Popen[bytes], call: Sequence[Any]) -> Verdict:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(list(call)).encode() + b"\n")
            line = _line(process, self.wall_seconds)
        except OSError:  # it was killed while it was idle
            line = b""
        if line:
            score, problem = json.loads(line)
            return Verdict(score, problem, timed_out=problem == "memory")
        status = _end(process, 0 if line is None else 5)
        if line is None:
            return Verdict(None, f"the machine was too busy for {self.wall_seconds:g} seconds")
        if status == -signal.SIGPROF:
            return Verdict(0.0, f"more than {self.cpu_seconds:g} seconds", timed_out=True)
        problem = f"the checking process ended with {status}"
        return Verdict(0.0, problem, timed_out=True) if -status in _BLAME else Verdict(None, problem)


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line, which is written at once; b"" at the process's end, None when the time is up."""
    assert process.stdout is not None
    return process.stdout.readline() if select.select([process.stdout], [], [], seconds)[0] else None


def _end(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Its exit status; it is killed if it has not ended after so long."""
    with process:  # closes the pipes
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def serve() -> None:
    """The process: a line with the arguments in, a line with [score, problem] out, until its input ends."""
    module, _, name = sys.argv[1].partition(":")
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints is no answer
    function = getattr(importlib.import_module(module), name)
    function(*json.loads(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    channel.write(b"ready\n")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        try:
            answer = [float(function(*json.loads(line))), ""]
        except MemoryError:
            answer = [0.0, "memory"]
        except Exception as error:  # libraries raise anything on text that nobody foresaw; no right answer
            answer = [0.0, f"{type(error).__name__}: {error}"[:500]]
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.write(json.dumps(answer).encode() + b"\n")
