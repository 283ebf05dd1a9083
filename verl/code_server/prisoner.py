"""The process that runs a program. All it sends is hostile input to those who read it.

    functions:  load the program once -> for each test a fork serves the judge's calls over its own channel
    stdio:      for each test a fork runs the program from its start, with files as stdin and stdout

It is PID 1 of its sandbox, which ends with it.
"""

from __future__ import annotations

import _socket
import operator
import posix
import sys
from collections.abc import Callable
from typing import Any

from verl.code_server.codec import Peer, Torn, parts_of, receive

DIRTY, CLEAN = b"d", b"c"  # does something of the last test remain?
OPERATORS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "isinstance": isinstance,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}


class Callback:
    """A callable of the test, as the program sees it."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self._number = peer, number

    def __call__(self, *args: Any) -> Any:
        return self._peer.request("callback", self._number, list(args))


class Servant:
    """Serves the judge over one channel: the names of the program, and what can be done with its objects."""

    def __init__(self, fd: int, namespace: dict[str, Any], problem: BaseException | None) -> None:
        self.namespace, self.problem = namespace, problem
        self.objects: list[Any] = []  # by the number of their handle
        self.numbers: dict[int, int] = {}  # the number of a handle by id()
        self.peer = Peer(fd, self.serve, self.pack, self.unpack)

    def run(self) -> None:
        try:
            while True:
                self.peer.answer_next()
        except Torn:
            pass

    def pack(self, value: Any) -> list[Any]:
        if isinstance(value, Callback):
            return ["c", value._number]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return ["h", self.numbers[id(value)]]

    def unpack(self, tag: str, number: int) -> Any:
        return self.objects[number] if tag == "h" else Callback(self.peer, number)

    def serve(self, op: str, *args: Any) -> Any:
        if op == "lookup":
            return self.lookup(args[0])
        if op == "call":
            function, positional, named = args
            result = function(*positional, **named)
            return [result, [item if isinstance(item, list | dict | set) else None for item in positional]]
        return OPERATORS[op](*args)

    def lookup(self, names: list[str]) -> Any:
        """[what loading the program raised, {name: where the judge gets it}]: ["module", module, name] to be
        imported, or ["value", value]."""
        found: dict[str, Any] = {}
        for name in names:
            if name in self.namespace:
                value = self.namespace[name]
                home = getattr(value, "__module__", None)
                if isinstance(value, type(sys)):
                    found[name] = ["module", value.__name__, ""]
                elif home in sys.stdlib_module_names and getattr(sys.modules.get(home), name, self) is value:
                    found[name] = ["module", home, name]
                else:
                    found[name] = ["value", value]
        return [None if self.problem is None else parts_of(self.problem), found]


def load(program: str, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Runs a program as a module; its names, and what it raised."""
    module = type(sys)(name)
    sys.modules[name] = module
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the program's too
        return module.__dict__, error
    return module.__dict__, None


def left_files() -> list[str]:
    try:
        return sorted(posix.listdir("/tmp"))
    except OSError:  # it may not even look
        return []


def serve_functions(control: _socket.socket, program: str, link: _socket.socket, may_fork: bool) -> None:
    """Loads the program, then takes one channel per test from the judge and serves it in a fork; the last one
    (b"l"), and each where forks are forbidden or would lose a thread, in the process itself.

    control is closed before the program starts: the program's word counts for nothing.
    """
    control.close()
    namespace, problem = load(program, "program")
    files = left_files()
    while True:
        kind, fds = receive(link)
        if not fds or left_files() != files:  # the last test left some: the next gets a new sandbox
            return
        if kind == b"l" or not may_fork or len(sys._current_frames()) > 1:
            link.close()
            Servant(fds[0], namespace, problem).run()
            return
        if posix.fork() == 0:
            link.close()
            Servant(fds[0], namespace, problem).run()
            posix._exit(0)
        posix.close(fds[0])
        try:
            while posix.waitpid(-1, posix.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def serve_stdio(control: _socket.socket, program: str, may_fork: bool, lock: Callable[[], None]) -> None:
    """For each [stdin, stdout] of the supervisor: runs the program in a fork, answers with its exit status
    (four bytes) and whether anything remains of it. This process runs nothing of the program.
    """
    while True:
        kind, fds = receive(control)
        if len(fds) != 2:
            return
        child = posix.fork()
        if child == 0:
            control.close()
            posix.dup2(fds[0], 0)
            posix.dup2(fds[1], 1)
            if kind == b"e":
                posix.dup2(fds[1], 2)
            posix.closerange(3, 256)
            lock()
            run_script(program)
        for fd in fds:
            posix.close(fd)
        status = posix.waitpid(child, 0)[1]
        try:
            if may_fork:
                posix.kill(-1, 9)  # all that it left running
            while True:
                posix.waitpid(-1, 0)
        except OSError:
            pass
        control.send(status.to_bytes(4, "little") + (DIRTY if left_files() else CLEAN))


def run_script(program: str) -> None:
    """Runs a program as __main__ and ends the process as Python does: threads, atexit, flush. An exit of its
    own (`sys.exit`) is no failure, as in Open-Instruct's grading; an exception is, with exit code 1.
    """

    def reopen(fd: int, mode: str) -> Any:  # bytes that are no UTF-8 pass through
        return open(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)

    sys.stdin, sys.stdout, sys.stderr = reopen(0, "r"), reopen(1, "w"), reopen(2, "w")
    problem = load(program, "__main__")[1]
    code = 0 if problem is None or isinstance(problem, SystemExit) else 1
    if isinstance(problem, MemoryError):
        code = 3
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
        if code:
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
            sys.stderr.flush()
    except BaseException:  # of the program's threads and handlers, or a full stdout
        code = code or 1
    posix._exit(code)
