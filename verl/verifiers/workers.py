"""Work on a policy's text in processes that can be killed: `9^(9^(9^9))` costs only its own row.

A process counts its own processor time, from when a call begins, and the kernel ends it there (SIGPROF), in
whatever C code it is. A busy machine thus makes no false zero, as waiting costs nothing. Memory is bounded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.verifiers.base import CouldNotVerify, Sample, Verdict, Verifier

_MEMORY_BYTES = 4 << 30  # of a process's address space
_MOST_PROCESSES = min(os.cpu_count() or 1, 16)
_BLAME = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE}  # C code that the text has led astray


class CheckFailed(Exception):
    """The function raised, or its arguments were too much for it."""

    def __init__(self, problem: str, too_much: bool) -> None:
        super().__init__(problem)
        self.too_much = too_much


class ProcessEnded(CouldNotVerify):
    """Someone else has ended two processes, or the machine is too busy."""


class CheckWorkers:
    """Processes that call one function; started when they are first needed, ended by `close`, or as the
    process ends that started them. Threads may share it.

    Args:
        function: module:function, called with JSON values; returns one. first: arguments of a call before
            the first one, without a clock, for what is imported late.
        cpu_seconds: processor time that one call may take.
    """

    def __init__(self, function: str, cpu_seconds: float, first: Sequence[Any]) -> None:
        self.function, self.cpu_seconds, self.first = function, cpu_seconds, first
        self.wall_seconds = max(60.0, 20 * cpu_seconds)  # a machine that is this busy can't verify
        self._idle: list[subprocess.Popen[bytes]] = []
        self._places = threading.BoundedSemaphore(_MOST_PROCESSES)

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Verdict]:
        """The verdict of each call of a function that returns scores, in order. Too much time or memory: 0
        with `timed_out`; `ProcessEnded`: no score. CouldNotVerify: no process can be started.
        """

        def verdict(call: Sequence[Any]) -> Verdict:
            try:
                return Verdict(float(self.ask(*call)))
            except CheckFailed as error:
                return Verdict(0.0, str(error), timed_out=error.too_much)
            except ProcessEnded as error:
                return Verdict(None, str(error))

        with ThreadPoolExecutor(_MOST_PROCESSES, "check") as pool:
            return list(pool.map(verdict, calls))

    def ask(self, *call: Any) -> Any:
        """What the function returns.

        Raises:
            CheckFailed: it raised, or took too much. CouldNotVerify: nobody knows; `ProcessEnded` too.
        """
        with self._places:
            for _ in range(2):
                process = self._take()
                assert process.stdin is not None
                try:
                    process.stdin.write(json.dumps(call).encode() + b"\n")
                    process.stdin.flush()
                    line = _line(process, self.wall_seconds)
                except OSError:  # it was killed while it was idle
                    line = b""
                if line:
                    self._idle.append(process)
                    result, problem = json.loads(line)
                    if problem:
                        raise CheckFailed(problem, too_much=problem == "memory")
                    return result
                status = _end(process, 0 if line is None else 5)
                if line is not None and status == -signal.SIGPROF:
                    raise CheckFailed(f"more than {self.cpu_seconds:g} seconds", too_much=True)
                problem = f"the checking process ended with {status}"
                if line is not None and -status in _BLAME:
                    raise CheckFailed(problem, too_much=True)
        raise ProcessEnded(problem if line is not None else f"no answer in {self.wall_seconds:g} seconds")

    def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            _end(self._idle.pop(), 0)

    def _take(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(IndexError):  # no idle one is left
            while (process := self._idle.pop()).poll() is not None:
                _end(process, 0)
            return process
        code = f"import sys; sys.path[:] = {sys.path!r}; from verl.verifiers.workers import serve; serve()"
        command = [sys.executable, "-c", code, self.function, str(self.cpu_seconds), json.dumps(self.first)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads take memory
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            raise CouldNotVerify(f"the checking process can't start ({error})") from error
        if not _line(process, 120):  # it says when it is ready
            raise CouldNotVerify(f"the checking process can't start (status {_end(process, 1)})")
        return process


class CheckedVerifier(Verifier):
    """A verifier whose work is done by such processes: `_call` gives the arguments of a sample."""

    def __init__(self, name: str, workers: CheckWorkers) -> None:
        self.name, self.workers = name, workers

    def verify_many(self, samples: Sequence[Sample]) -> list[Verdict]:
        return self.workers.map([self._call(sample) for sample in samples])

    def close(self) -> None:
        self.workers.close()

    def _call(self, sample: Sample) -> Sequence[Any]:
        raise NotImplementedError


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line; b"" at the process's end, None when the time is up."""
    assert process.stdout is not None
    poll = select.poll()  # `select.select` takes no file beyond the 1,024th
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(1000 * seconds) else None
    return line if line is None or line.endswith(b"\n") else b""


def _end(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Its exit status; it is killed if it has not ended after so long."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    process.communicate()  # closes the pipes
    return status


def serve() -> None:
    """The process: a line with the arguments in, a line with [result, problem] out, until its input ends."""
    module, _, name = sys.argv[1].partition(":")
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    function = getattr(importlib.import_module(module), name)
    function(*json.loads(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    channel.write(b"ready\n")
    channel.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        try:
            answer = json.dumps([function(*json.loads(line)), ""])
        except MemoryError:
            answer = '[null, "memory"]'
        except Exception as error:  # libraries raise anything on text that nobody foresaw; no right answer
            answer = json.dumps([None, f"{type(error).__name__}: {error}"[:500]])
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.write(answer.encode() + b"\n")
        channel.flush()
