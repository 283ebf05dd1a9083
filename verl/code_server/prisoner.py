"""The process that runs a program. All it sends is hostile input to those who read it.

PID 1 of the sandbox -> for each test a fork that loads the program: serves the judge's calls over a channel
                        of its own, or runs with files as stdin and stdout
"""

from __future__ import annotations

import _socket
import operator
import posix
import sys
from collections.abc import Callable
from typing import Any

from verl.code_server.codec import Peer, Torn, parts_of, receive

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


def compile_program(program: str) -> Any:
    """Its code, or the exception that says why it is none."""
    try:
        return compile(program, "<program>", "exec", 0, True)
    except BaseException as error:  # SyntaxError, ValueError, MemoryError, RecursionError
        return error


def load(code: Any, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Runs a program of `compile_program` as a module; its names, and what it raised."""
    module = type(sys)(name)
    sys.modules[name] = module
    try:
        if isinstance(code, BaseException):
            raise code
        exec(code, module.__dict__)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the program's too
        return module.__dict__, error
    return module.__dict__, None


def serve_tests(
    role: bytes, program: str, source: _socket.socket, alone: bool, lock: Callable[[], None]
) -> None:
    """For each test runs the program from its start in a fork; between two tests ends all that is left of it.
    This process compiles the program but runs nothing of it. It ends where files are left: the next test
    needs a new sandbox.

    role: b"functions": a test comes as its channel to the judge; the next one, or the end, is the sign
        that it is over. b"stdio": as [stdin, stdout]; answered by the exit status (four bytes) and b"d" where
        files are left, else b"c".
    alone: in a PID namespace of its own. lock: what a fork does before it runs the program.
    """
    child, code = 0, compile_program(program)
    while True:
        kind, fds = receive(source)
        if child:
            end(child, alone)
        if not fds or alone and posix.listdir("/tmp"):
            return
        child = posix.fork()
        if child == 0:
            lock()
            if role == b"stdio":
                run_script(code, fds, kind == b"e")
            posix.dup2(fds[0], 3)
            posix.closerange(4, 256)
            Servant(3, *load(code, "program")).run()
            posix._exit(0)
        for fd in fds:
            posix.close(fd)
        if role == b"stdio":
            status = end(child, alone, wait=True)
            child = 0
            source.send(status.to_bytes(4, "little") + (b"d" if alone and posix.listdir("/tmp") else b"c"))


def end(child: int, alone: bool, wait: bool = False) -> int:
    """Ends a test's process and all that it has started; its exit status. wait: it ends by itself."""
    if not wait:
        posix.kill(child, 9)
    status = posix.waitpid(child, 0)[1]
    try:
        if alone:
            posix.kill(-1, 9)
        while True:
            posix.waitpid(-1, 0)
    except OSError:  # there is none
        return status


def run_script(code: Any, fds: list[int], with_errors: bool) -> None:
    """Runs a program as __main__ with files as stdin and stdout, and ends the process as Python does:
    threads, atexit, flush. `sys.exit` is no failure, as in Open-Instruct's grading; an exception is: exit
    code 1, or 3 for want of memory.
    """
    posix.dup2(fds[0], 0)
    posix.dup2(fds[1], 1)
    if with_errors:
        posix.dup2(fds[1], 2)
    posix.closerange(3, 256)
    problem = load(code, "__main__")[1]
    status = 0 if problem is None or isinstance(problem, SystemExit) else 1
    if isinstance(problem, MemoryError):
        status = 3
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
        if status:
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
            sys.stderr.flush()
    except BaseException:  # of the program's threads and handlers, or a full stdout
        status = status or 1
    posix._exit(status)
