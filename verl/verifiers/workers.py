"""Calls in processes that can be killed.

`9^(9^(9^9))`, or an environment that hangs, costs only its own row.

    this process --control--> nursery --fork--> a process for each call under way, or for each episode
        +--------------- a socket to each: arguments -> (problem, result) ----------------+

The nursery is a fresh interpreter. It has imported the function and called it once, so that a fork of it
costs milliseconds and holds no memory of the trainer's. The nursery ends with the trainer, and its processes
end with the nursery. A process that ends in a call sends last words, which Python's faulthandler writes,
unless it was killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, NoReturn

from verl.utils.errors import CouldNotVerify
from verl.utils.importing import place_of
from verl.verifiers.verifier import Sample, Verdict, Verifier, VerifierSettings

_MEMORY_BYTES = 4 << 30  # the limit of a checking process's address space
_MOST_PROCESSES = min(os.cpu_count() or 1, 16)
_MOST_IDLE = 32
_START_SECONDS = 120.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class CheckFailed(Exception):
    """An error that the function raised in its process.

    Attributes:
        place: The line that raised it, for people to read.
    """

    place = ""


class LimitExceeded(CheckFailed):
    """The error that the arguments are too much for the function.

    They took too much time or memory, or crashed C code.
    """


class ProcessEnded(CouldNotVerify):
    """The error that someone else has ended a process in a call, or that it gave no answer."""


class KillableProcess:
    """A process that calls the workers' function, for one thread at a time.

    The constructor raises OSError if the process can't be started.
    """

    def __init__(self, workers: KillableWorkers) -> None:
        self.is_alive = True
        self._cpu_seconds = workers.cpu_seconds
        self._socket, process_end = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        self._socket.settimeout(_START_SECONDS)
        with process_end:
            program = workers.request_process(process_end)
        try:
            self.pid: int = pickle.load(self._replies)
        except (OSError, EOFError):
            program.kill()
            raise OSError(f"status {program.wait()}") from None

    def call(self, *arguments: Any, seconds: float | None = None) -> Any:
        """Call the function in the process and return its result.

        Args:
            arguments: The arguments of the function.
            seconds: The time to wait for an answer. None to wait for as long as it takes.

        Raises:
            CheckFailed: If the function raised.
            CouldNotVerify: If the function raised CouldNotVerify.
            LimitExceeded: If the process has ended with last words.
            ProcessEnded: If the process was killed, or took longer than `seconds`.
        """
        request = pickle.dumps(arguments)
        last_words = b""
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            self._socket.settimeout(seconds)
            self._socket.sendall(request)
            if self._replies.peek(1)[:1] == b"\x80":  # the first byte of a pickle
                problem, result = pickle.load(self._replies)
                if problem is not None:
                    raise problem
                return result
            last_words = self._replies.readline()
        self.kill()
        if last_words.startswith(b"Stack"):  # its clock ran out
            raise LimitExceeded(f"more than {self._cpu_seconds:g} seconds")
        raise LimitExceeded(last_words.decode()) if last_words else ProcessEnded

    def kill(self) -> None:
        """End the process and all that it has started.

        A thread that is in `call` raises.
        """
        self.is_alive = False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class KillableWorkers:
    """A nursery and its processes, some of which are kept for the next user.

    Threads may share it.

    Args:
        function: The function to call, as module:function.
        cpu_seconds: The processor time that one call may take. The kernel ends the process after it, in
            whatever C code it is. Waiting costs nothing, so that a busy machine makes no false zero.
            Processes with such a clock have a limit of memory, too, and their output is discarded. With 0
            there is neither a clock nor a limit.
        warm_up_arguments: The arguments of a call before the first fork, which makes the function's late
            imports happen.
    """

    def __init__(self, function: str, cpu_seconds: float, warm_up_arguments: Sequence[Any]) -> None:
        self.function = function
        self.cpu_seconds = cpu_seconds
        self.warm_up_arguments = warm_up_arguments
        self._idle: list[KillableProcess] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_MOST_PROCESSES)
        self._program: subprocess.Popen[bytes] | None = None

    def take(self) -> KillableProcess:
        """Return a process that nobody uses.

        Raises OSError if none can be started.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return KillableProcess(self)

    def give_back(self, process: KillableProcess) -> None:
        """Take back a process that is in no call, for the next user."""
        if process.is_alive and len(self._idle) < _MOST_IDLE:
            self._idle.append(process)
        elif process.is_alive:
            process.kill()

    def request_process(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        """Ask the nursery for a process that serves a connection, and return the nursery.

        The nursery is started if it does not run. The new process sends its pid over the connection.
        """
        with self._lock:
            if self._program is None or self._program.poll() is not None:
                self._control, nursery_end = socket.socketpair()
                arguments = (nursery_end.fileno(), self.function, self.cpu_seconds, [*self.warm_up_arguments])
                # Processes of environments keep the user's setting.
                is_set = not self.cpu_seconds and "OMP_NUM_THREADS" in os.environ
                threads = {} if is_set else _ONE_THREAD
                code = f"import os, sys; os.environ |= {threads}; sys.path[:] = {sys.path}; "
                code += f"from verl.verifiers.workers import serve; serve{arguments}"
                # The output is unbuffered, because the processes end without flushing.
                command = [sys.executable, "-u", "-c", code]
                silent = ("stdin", "stdout", "stderr") if self.cpu_seconds else ("stdin",)
                streams: Any = dict.fromkeys(silent, subprocess.DEVNULL)
                with nursery_end:  # The nursery gets a session of its own, because Ctrl-C is for the run.
                    self._program = subprocess.Popen(
                        command, pass_fds=[nursery_end.fileno()], start_new_session=True, **streams
                    )
            with suppress(OSError):  # the nursery has ended
                socket.send_fds(self._control, [b"."], [connection.fileno()])
            return self._program

    def call_in_any(self, *call: Any) -> Any:
        """Call the function in any of the processes and return its result.

        At most `_MOST_PROCESSES` of these calls run at a time.

        Raises:
            CheckFailed: If the function raised, or took too much time or memory.
            CouldNotVerify: If the function raised CouldNotVerify, or if no process can be started.
            ProcessEnded: If someone else has ended two processes, or if the machine is too busy.
        """
        seconds = max(60.0, 20 * self.cpu_seconds)  # a machine that is this busy can't verify
        with self._slots:
            for is_again in (False, True):
                try:
                    process = KillableProcess(self) if is_again else self.take()
                except OSError as error:
                    raise CouldNotVerify(f"the checking process can't start ({error})") from error
                try:
                    return process.call(*call, seconds=seconds)
                except ProcessEnded:
                    continue
                finally:
                    self.give_back(process)
        raise ProcessEnded("the checking process was killed twice, or gave no answer")

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().kill()
        if self._program is not None:
            self._program.kill()
            self._program.wait()


@cache
def shared_workers(function: str, cpu_seconds: float, warm_up_arguments: tuple[Any, ...]) -> KillableWorkers:
    """Return the workers of this process that all callers with the same arguments share."""
    return KillableWorkers(function, cpu_seconds, warm_up_arguments)


# A fork must not use its parent's processes.
os.register_at_fork(after_in_child=shared_workers.cache_clear)


class CheckedVerifier(Verifier):
    """A verifier whose `function` scores a sample in processes that can be killed.

    Attributes:
        function: The function that scores, as module:function.
        warm_up_arguments: The arguments of a first call, as in `KillableWorkers`.
        _call: Takes a sample and returns the arguments of `function`.
    """

    function: ClassVar[str]
    warm_up_arguments: ClassVar[Sequence[Any]]
    _call: Callable[[Sample], Sequence[Any]]

    def open(self, settings: VerifierSettings) -> None:
        self.workers = KillableWorkers(self.function, settings.config.cpu_seconds, self.warm_up_arguments)

    def verify_many(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdict on each response, in order.

        A response that takes too much time or memory gets 0, with `timed_out`. Raises CouldNotVerify if no
        process can be started.
        """

        def verdict(sample: Sample) -> Verdict:
            try:
                return Verdict(float(self.workers.call_in_any(*self._call(sample))))
            except CheckFailed as error:
                return Verdict(0.0, str(error), timed_out=isinstance(error, LimitExceeded))
            except ProcessEnded as error:
                return Verdict(None, str(error))

        with ThreadPoolExecutor(_MOST_PROCESSES, "check") as pool:
            return list(pool.map(verdict, samples))

    def close(self) -> None:
        self.workers.close()


def serve(control_fd: int, name: str, cpu_seconds: float, warm_up_arguments: Sequence[Any]) -> None:
    """Run the nursery: fork a process for each connection that arrives, until the control socket closes.

    Args:
        control_fd: The control socket, on which the connections arrive.
        name: The function to call, as module:function.
        cpu_seconds: The processor time that one call may take. 0 for no limit.
        warm_up_arguments: The arguments of a first call.
    """
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    function(*warm_up_arguments)
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            _answer_calls(function, fds[0], cpu_seconds)
        os.close(fds[0])


def _answer_calls(function: Callable[..., Any], connection_fd: int, cpu_seconds: float) -> NoReturn:
    """Answer each call that arrives on a connection, in a process of its own, until the connection closes."""
    os.setsid()  # This also gives it its own share of a busy machine, which schedules by sessions.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu_seconds:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection = socket.socket(fileno=connection_fd)
    faulthandler.enable(connection)
    faulthandler.register(signal.SIGPROF, connection, all_threads=False, chain=True)
    requests = connection.makefile("rb")
    connection.sendall(pickle.dumps(os.getpid()))
    while requests.peek(1):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply = pickle.dumps((None, function(*pickle.load(requests))))
        except CouldNotVerify as error:
            reply = pickle.dumps((CouldNotVerify(str(error)), None))
        except MemoryError:
            reply = pickle.dumps((LimitExceeded("memory"), None))
        except (Exception, SystemExit) as error:  # libraries and environments raise anything
            failed = CheckFailed(f"{type(error).__name__}: {error}"[:500])
            failed.place = place_of(error)
            reply = pickle.dumps((failed, None))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(reply)
    os._exit(0)
