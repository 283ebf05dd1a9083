"""Processes that hold one environment each, and can be killed: those of `executor=process`.

    trainer --socket--> nursery --fork--> a process for each environment that is in use
        +------------------ a connection to each: (method, arguments) -> (ok, result) -------+

The nursery is this module as a program. It has imported the environments' module and little else, so that a
fork of it costs milliseconds and holds no memory of the trainer's. It ends with the trainer, and its children
end with it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from verl.environments.base import EpisodeFailed, Message, make_environment
from verl.verifiers.base import CouldNotVerify

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class EnvProcess:
    """A process with one environment at a time."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid: int | None = None
        self.is_alive = True

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """What a method of the environment returns.

        Raises:
            EpisodeFailed, CouldNotVerify: it raised, it took longer than `timeout` seconds (then the process
                is killed), or the process died.
        """
        try:
            self.connection.send_bytes(pickle.dumps((method, arguments)))
            if self.pid is None:
                if not self.connection.poll(timeout):
                    raise EpisodeFailed("its process did not start")
                self.pid = int(self.connection.recv_bytes())
            if not self.connection.poll(timeout):
                self.kill()
                raise EpisodeFailed(
                    f"{method} took longer than {timeout:g} s (environment.step_timeout) and was killed"
                )
            outcome, result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.kill()
            raise EpisodeFailed("its process died") from error
        if outcome == "unverified":
            raise CouldNotVerify(result)
        if outcome == "failed":
            raise EpisodeFailed(result)
        return result

    def kill(self, is_busy: bool = False) -> None:
        """Ends it and what it has started. is_busy: another thread is in `call`, which closes its end."""
        self.is_alive = False
        if not is_busy:
            with suppress(OSError):
                self.connection.close()
        pid, self.pid = self.pid, None
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


class Nursery:
    """Makes processes, and keeps those that an episode has left for the next one."""

    def __init__(self, module: str, most_idle: int) -> None:
        """module: of the environments' class. most_idle: processes that are kept."""
        self.module, self.most_idle = module, most_idle
        self._idle: list[EnvProcess] = []
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None

    def take(self) -> EnvProcess:
        """A process without an environment."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._program is None or self._program.poll() is not None:
                self._start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return EnvProcess(Connection(ours.detach()))

    def give_back(self, process: EnvProcess) -> None:
        """Its environment is closed."""
        with self._lock:
            if len(self._idle) < self.most_idle and self._control is not None:
                self._idle.append(process)
                return
        process.kill()

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            control, self._control = self._control, None
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()
        if control is not None and self._program is not None:
            control.close()
            self._program.kill()  # it may be held up in an import; its children end with it
            self._program.wait()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "verl.environments.env_process", str(theirs.fileno()), self.module],
                # unbuffered: a child ends without flushing what its environment has printed
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the trainer's
            )


class ProcessEnvironment:
    """Stands for an environment that lives in a process, from its first call on."""

    def __init__(self, nursery: Nursery, arguments: tuple[Any, ...], timeout: float) -> None:
        """arguments: of `make_environment`. timeout: seconds of each call."""
        self.nursery, self.arguments, self.timeout = nursery, arguments, timeout
        self._process: EnvProcess | None = None
        self._is_busy = False

    def init(self, prompt: list[Message]) -> Any:
        return self._call("init", prompt)

    def step(self, action: str) -> Any:
        return self._call("step", action)

    def get_metrics(self) -> Any:
        return self._call("get_metrics")

    def close(self) -> None:
        self._call("close")

    def can_end(self) -> bool:
        """Whether there is an environment to close. One that is at something is killed."""
        if self._process is not None and self._is_busy:
            self._process.kill(is_busy=True)
        return self._process is not None and self._process.is_alive

    def give_back(self) -> None:
        """Leaves the process to another episode."""
        if self._process is not None and self._process.is_alive:
            self.nursery.give_back(self._process)
        self._process = None

    def _call(self, method: str, *arguments: Any) -> Any:
        self._is_busy = True
        try:
            if self._process is None:
                self._process = self.nursery.take()
                self._process.call("make", *self.arguments, timeout=self.timeout)
            return self._process.call(method, *arguments, timeout=self.timeout)
        finally:
            self._is_busy = False


def serve(connection: Connection) -> None:
    """A child: one answer for each call, until the connection closes."""
    env: Any = None
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            method, arguments = pickle.loads(request)
            if method == "make":
                env = make_environment(*arguments)
                result: Any = None
            else:
                result = getattr(env, method)(*arguments)
            reply = pickle.dumps(("ok", result))
        except CouldNotVerify as error:
            reply = pickle.dumps(("unverified", str(error)))
        except Exception as error:  # it is a user's environment: anything may come
            reply = pickle.dumps(("failed", f"{type(error).__name__}: {error}"))
        connection.send_bytes(reply)


def main() -> None:
    """The nursery: forks a child for each connection that comes through the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with suppress(Exception):  # the child that makes the environment says what is wrong with its module
        __import__(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            connection = Connection(fds[0])
            with suppress(BrokenPipeError):
                connection.send_bytes(str(os.getpid()).encode())
                serve(connection)
            os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    main()
