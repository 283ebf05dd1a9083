"""The process that runs a program. All it sends is hostile input to those who read it.

first process of the sandbox -> for each test a fork that loads the program: serves the judge's calls over a
                                channel of its own, or runs with files as stdin and stdout
"""

from __future__ import annotations

import _codecs
import _io
import _socket
import _thread
import gc
import marshal
import operator
import posix
import sys
from collections.abc import Callable
from typing import Any

from verl.code_server.codec import Peer, Torn, parts_of, receive

OPERATORS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    **{kind.__name__: kind for kind in (bool, isinstance, iter, len, next, repr, str)},
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul")},
}


class Servant:
    """Serves the judge over one channel: the names of the program, and what can be done with its objects.
    Each test begins with `lookup`, or is `run`: they load the program anew. With the list of its modules the
    program is plain (plain.py): more tests may follow."""

    def __init__(self, fd: int, code: Any) -> None:
        # so far, of a plain program
        self.code = code
        self.num_tests = 0
        self.objects: list[Any] = []  # by the number of their handle
        self.numbers: dict[int, int] = {}  # the number of a handle by id()
        self.callbacks: dict[int, tuple[Any, int]] = {}  # the test's callables and their numbers by id()
        self.peer = Peer(fd, self.serve, self.pack, self.unpack)

    def run(self) -> None:
        try:
            while True:
                self.peer.answer_next()
        except Torn:
            pass

    def pack(self, value: Any) -> list[Any]:
        if id(value) in self.callbacks:
            return ["c", self.callbacks[id(value)][1]]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return ["h", self.numbers[id(value)]]

    def unpack(self, tag: str, number: int) -> Any:
        if tag == "h":
            return self.objects[number]
        request = self.peer.request

        def callback(*args: Any) -> Any:  # all that a program gets hold of beside plain data
            return request("callback", number, list(args))

        self.callbacks[id(callback)] = callback, number
        return callback

    def serve(self, op: str, *args: Any) -> Any:
        if op in ("lookup", "run"):
            return (self.lookup if op == "lookup" else self.run_text)(*args)
        if op == "call":
            function, positional, named = args
            result = function(*positional, **named)
            return [result, [item if isinstance(item, list | dict | set) else None for item in positional]]
        return OPERATORS[op](*args)

    def lookup(self, names: list[str], modules: list[str] | None = None) -> Any:
        """[what loading the program raised, {name: where the judge gets it}]: ["module", module, name] to be
        imported, or ["value", value]."""
        if modules is not None:
            self.forget(modules)
            modes = ("rb", "wb", "wb")
            open_streams([_io.open(fd, mode, closefd=False) for fd, mode in enumerate(modes)])
        namespace, problem = load(self.code, "program")
        found: dict[str, Any] = {}
        for name in names:
            if name in namespace:
                value = namespace[name]
                home = getattr(value, "__module__", None)
                if isinstance(value, type(sys)):
                    found[name] = ["module", value.__name__, ""]
                elif home in sys.stdlib_module_names and getattr(sys.modules.get(home), name, self) is value:
                    found[name] = ["module", home, name]
                else:
                    found[name] = ["value", value]
        return [None if problem is None else parts_of(problem), found]

    def run_text(self, text: str, modules: list[str]) -> list[Any]:
        """[exit status, stdout] of the program with a text as stdin."""
        self.forget(modules)
        given = _io.BytesIO(text.encode(errors="surrogatepass"))
        taken = _io.BytesIO()
        writers = [_io.BufferedWriter(each) for each in (taken, _io.BytesIO())]
        open_streams([_io.BufferedReader(given), *writers])
        problem = load(self.code, "__main__")[1]
        sys.stdout.flush()
        return [exit_status(problem), taken.getvalue()]

    def forget(self, modules: list[str]) -> None:
        """Ends all that the test before has left of a plain program."""
        self.num_tests += 1
        if self.num_tests == 1:
            for name in modules:
                __import__(name)
            gc.collect()
            return gc.freeze()  # what is older than the program is not looked at between two tests
        if self.num_tests == 2:
            know_few_codecs()
        for module in ("program", "__main__"):
            sys.modules.pop(module, None)
        for each in (self.objects, self.numbers, self.callbacks):
            each.clear()
        sys.setrecursionlimit(1000)
        for clear in getattr(sys.modules.get("typing"), "_cleanups", ()):
            clear()
        gc.collect()


def open_streams(files: list[Any]) -> None:
    """Makes binary files stdin, stdout and stderr, as Python does at its start in UTF-8 mode."""
    errors = ("surrogateescape", "surrogateescape", "backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = [
        _io.TextIOWrapper(file, "utf-8", each, newline="\n") for file, each in zip(files, errors, strict=True)
    ]


def know_few_codecs() -> None:
    """From now on all codecs but a few are unknown: a test could tell by those that are loaded what the one
    before it did. A test that asks for another fails, and runs once more in a process of its own."""
    known = {name: _codecs.lookup(name) for name in ("utf-8", "utf8", "ascii", "latin-1", "latin1")}
    _codecs.unregister(sys.modules["encodings"].search_function)
    known |= {name.replace("-", "_"): info for name, info in known.items()}
    _codecs.register(known.get)
    for name in known:
        _codecs.lookup(name)


def load(code: Any, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Runs the code of a program as a module; its names, and what it raised."""
    module = type(sys)(name)
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the program's too
        return module.__dict__, error
    return module.__dict__, None


def exit_status(problem: BaseException | None) -> int:
    """An exception is a failure: 1, or 3 for want of memory. `sys.exit` is none, as in Open-Instruct."""
    if isinstance(problem, MemoryError):
        return 3
    return 0 if problem is None or isinstance(problem, SystemExit) else 1


class Traces:
    """What a program may leave in a sandbox though all its processes have ended: in /tmp (whose ctime nobody
    can set), and in the numbers that the PID namespace gives, one after the other."""

    def __init__(self) -> None:
        self.ctime = posix.stat("/tmp").st_ctime_ns
        self.last_pid = self.next_pid()

    def next_pid(self) -> int:
        """A number of the namespace, that of a thread which ends at once."""
        numbers: list[int] = []
        ended = _thread.allocate_lock()
        ended.acquire()

        def note() -> None:
            numbers.append(_thread.get_native_id())
            ended.release()

        _thread.start_new_thread(note, ())
        ended.acquire()
        return numbers[0]

    def are_left(self, forks: int) -> bool:
        """forks: of this process itself since the last time."""
        expected = self.last_pid + forks + 1
        self.last_pid = self.next_pid()
        changed = posix.stat("/tmp").st_ctime_ns != self.ctime
        return changed or self.last_pid != expected or bool(posix.listdir("/tmp"))


def serve_tests(
    link: _socket.socket,
    control: _socket.socket,
    alone: bool,
    is_touched: Callable[[int], bool],
    lock: Callable[[], None],
) -> None:
    """Runs a program from its start in a fork for each message of a link, until the link ends. Between two
    messages it ends all that is left of the fork. This process never reads the program: its memory is that
    of all programs to come. It ends where a program has left traces: the next test needs a new sandbox.

    A message's files are the program's code and, with b"f", the channel to the judge; with b"r" or b"e",
    stdin and stdout (b"e": and stderr). A run is answered to `control` by its exit status (four bytes) and
    b"d" where this process ends, else b"c".

    alone: in a PID namespace and with a /tmp of its own. is_touched: see `Traces.are_left`. lock: what a fork
    does before it runs the program.
    """
    child = 0
    while True:
        kind, fds = receive(link)
        if child:
            end(child, alone)
            child = 0
            if is_touched(1):
                posix._exit(0)
        if not fds:
            return
        child = posix.fork()
        if child == 0:
            lock()
            code = marshal.loads(posix.pread(fds[0], posix.fstat(fds[0]).st_size, 0))
            if kind != b"f":
                run_script(code, fds[1:], kind == b"e")
            posix.dup2(fds[1], 3)
            posix.closerange(4, 256)
            Servant(3, code).run()
            posix._exit(0)
        for fd in fds:
            posix.close(fd)
        if kind != b"f":
            status = end(child, alone, wait=True).to_bytes(4, "little")
            child = 0
            touched = is_touched(1)
            control.send(status + (b"d" if touched else b"c"))
            if touched:
                posix._exit(0)


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
    threads, atexit, flush."""
    posix.dup2(fds[0], 0)
    posix.dup2(fds[1], 1)
    if with_errors:
        posix.dup2(fds[1], 2)
    posix.closerange(3, 256)
    problem = load(code, "__main__")[1]
    status = exit_status(problem)
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
