"""The process that runs a program.

All that it sends is hostile input to those who read it.

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
import posix
import sys
from collections.abc import Callable
from typing import Any

from verl.code_server.inside import InsideTest, Library
from verl.code_server.wire import NotPlain, Torn, answer, receive

MUTABLE = ("list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "defaultdict", "ndarray")


class ProgramServer:
    """The servant of the judge over one channel.

    It evaluates what a test asks of the program, or runs the whole test. Each test begins with the question
    `load`, or is the question `run`. Both load the program anew. If they get the list of the program's
    modules, the program is plain (plain.py), and more tests may follow.
    """

    def __init__(self, fd: int, code: Any) -> None:
        self.fd = fd
        self.code = code
        self.process = posix.getpid()
        self.num_tests = 0  # the number of tests so far, if the program is plain
        self.namespace: dict[str, Any] = {}
        self.library: Library | None = None

    def run(self) -> None:
        try:
            while True:
                answer(self.fd, self.serve)
        except Torn:
            pass

    def serve(self, question: str, *parts: Any) -> Any:
        try:
            return getattr(self, question)(*parts)
        finally:
            if posix.getpid() != self.process:  # a copy, forked by the program or the test, has no say
                posix._exit(0)

    def load(
        self, names: list[str], modules: list[str] | None, imports: list[str], attributes: list[str]
    ) -> list[Any]:
        """Load the program and say what each name stands for.

        Args:
            names: The names that a test uses.
            modules: The modules of a plain program. None if the program is not plain.
            imports: The modules that the test imports, if it may run here.
            attributes: The attributes in the test's text.

        Returns:
            A list of the exception's name of loading the program, or "", and a dictionary with an entry for
            each name that the program has: its kind and, if it may be imported, its module.
        """
        if modules is not None:
            self.reset_between_tests(modules)
            modes = ("rb", "wb", "wb")
            open_streams([_io.open(fd, mode, closefd=False) for fd, mode in enumerate(modes)])
        else:
            self.library = Library(imports, attributes)
        self.namespace, problem = load(self.code, "program")
        sources = {name: source_of(name, self.namespace[name]) for name in names if name in self.namespace}
        return ["" if problem is None else type(problem).__name__, sources]

    def evaluate(self, name: str, steps: list[Any]) -> list[Any]:
        """Evaluate attributes and calls of one of the program's names.

        Returns:
            The value, the calls' arguments that may have changed, and whether the value has a class of the
            program.

        Args:
            name: The name.
            steps: For each step ["a", attribute], or ["c", arguments, named arguments].
        """
        value = first = self.namespace[name]
        given: list[Any] = []
        for kind, *parts in steps:
            if kind == "a":
                value = getattr(value, parts[0])
            else:
                arguments, named = parts
                given.extend(arguments)
                value = value(*arguments, **named)
        is_made = len(steps) == 1 and steps[0][0] == "c" and isinstance(first, type)
        if is_made and not isinstance(value, first):
            raise NotPlain("a class that makes something else")
        changed = [[index, item] for index, item in enumerate(given) if type(item).__name__ in MUTABLE]
        is_own = getattr(type(value), "__module__", "") == "program"
        return [value, changed, is_own]

    def test(self, nonce: int, code: bytes, names: list[str], value: int) -> list[Any]:
        """Run a test with the program (see `InsideTest`), and return [nonce, outcome]."""
        assert self.library is not None
        test = InsideTest(self.namespace, self.library, names, value)
        return [nonce, test.run(marshal.loads(code))]

    def run_text(self, text: str, modules: list[str]) -> list[Any]:
        """Run a plain program with a text as stdin, and return [exit status, stdout]."""
        self.reset_between_tests(modules)
        stdin = _io.BytesIO(text.encode(errors="surrogatepass"))
        stdout = _io.BytesIO()
        writers = [_io.BufferedWriter(output) for output in (stdout, _io.BytesIO())]
        open_streams([_io.BufferedReader(stdin), *writers])
        problem = load(self.code, "__main__")[1]
        sys.stdout.flush()
        return [exit_status(problem), stdout.getvalue()]

    def reset_between_tests(self, modules: list[str]) -> None:
        """Remove all that the test before has left of a plain program."""
        self.num_tests += 1
        if self.num_tests == 1:
            for name in modules:
                __import__(name)
            gc.collect()
            return gc.freeze()  # so that collections between two tests skip what is older than the program
        if self.num_tests == 2:
            restrict_codecs()
        for module in ("program", "__main__"):
            sys.modules.pop(module, None)
        self.namespace = {}
        sys.setrecursionlimit(1000)
        for clear in getattr(sys.modules.get("typing"), "_cleanups", ()):
            clear()
        gc.collect()


def source_of(name: str, value: Any) -> list[str]:
    """Return the kind of a program's value, and the module from which the judge may import it, or ""."""
    kind = type(value)
    if kind is type(sys):
        return ["module", value.__name__]
    is_class = isinstance(value, type)
    home = getattr(value, "__module__", None)
    if (
        type(home) is not str
        or home not in sys.stdlib_module_names
        or getattr(sys.modules.get(home), name, None) is not value
    ):
        home = ""
    if is_class:
        return ["class", home]
    return ["function" if kind.__name__ in FUNCTIONS else "value", home]


FUNCTIONS = ("function", "builtin_function_or_method", "method", "_lru_cache_wrapper", "partial")


def open_streams(files: list[Any]) -> None:
    """Make binary files stdin, stdout and stderr, as Python does when it starts in UTF-8 mode."""
    errors = ("surrogateescape", "surrogateescape", "backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = [
        _io.TextIOWrapper(file, "utf-8", handler, newline="\n")
        for file, handler in zip(files, errors, strict=True)
    ]


def restrict_codecs() -> None:
    """Make all codecs but a few unknown from now on.

    Otherwise a test could tell from the codecs that are loaded what the test before it did. A test that asks
    for another codec fails, and runs once more in a process of its own.
    """
    codecs = {name: _codecs.lookup(name) for name in ("utf-8", "utf8", "ascii", "latin-1", "latin1")}
    _codecs.unregister(sys.modules["encodings"].search_function)
    codecs |= {name.replace("-", "_"): info for name, info in codecs.items()}
    _codecs.register(codecs.get)
    for name in codecs:
        _codecs.lookup(name)


def load(code: Any, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Run the code of a program as a module, and return its names and the exception that it raised."""
    module = type(sys)(name)
    module.__dict__["__builtins__"] = vars(sys.modules["builtins"])  # this module has builtins of its own
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:  # a program may also raise SystemExit and KeyboardInterrupt
        return module.__dict__, error
    return module.__dict__, None


def exit_status(problem: BaseException | None) -> int:
    """Return the exit status for the exception of a program.

    The status of a failure is 3 for a lack of memory, and 1 for any other exception. `sys.exit` is no
    failure, as in Open-Instruct.
    """
    if isinstance(problem, MemoryError):
        return 3
    return 0 if problem is None or isinstance(problem, SystemExit) else 1


class Traces:
    """The traces that a program may leave in a sandbox although all its processes have ended.

    They are in /tmp, whose ctime nobody can set, and in the numbers that the PID namespace gives, one after
    the other.
    """

    def __init__(self) -> None:
        self.ctime = posix.stat("/tmp").st_ctime_ns
        self.last_pid = self.next_pid()

    def next_pid(self) -> int:
        """Take a number of the namespace, by a thread that ends at once."""
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
        """Return whether there are traces.

        Args:
            forks: The number of forks of this process itself since the last call.
        """
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
    """Run a program from its start in a fork for each message of a link, until the link ends.

    Between two messages all that is left of the fork is ended. This process never reads the program, because
    all programs to come inherit its memory. If a program has left traces, this process ends, because the next
    test then needs a new sandbox.

    The first file of a message is the program's code. With b"f" the second is the channel to the judge. With
    b"r" or b"e" the others are stdin and stdout, and with b"e" stderr goes to the file of stdout. A run is
    answered on `control` by its exit status (four bytes), followed by b"d" if this process ends and b"c" if
    it does not.

    Args:
        link: The socket on which the messages come.
        control: The socket on which runs are answered.
        alone: Whether this process has a PID namespace and a /tmp of its own.
        is_touched: Takes the number of forks, as `Traces.are_left`.
        lock: Locks up a fork before it runs the program.
    """
    child = 0
    while True:
        kind, fds = receive(link)
        if child:
            end_processes(child, alone)
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
            ProgramServer(3, code).run()
            posix._exit(0)
        for fd in fds:
            posix.close(fd)
        if kind != b"f":
            status = end_processes(child, alone, wait=True).to_bytes(4, "little")
            child = 0
            touched = is_touched(1)
            control.send(status + (b"d" if touched else b"c"))
            if touched:
                posix._exit(0)


def end_processes(child: int, alone: bool, wait: bool = False) -> int:
    """End a test's process and all that it has started, and return the exit status of the process.

    Args:
        child: The process.
        alone: Whether the PID namespace holds nothing but this process and what it has started.
        wait: Whether to wait until the process ends by itself, instead of killing it.
    """
    if not wait:
        posix.kill(child, 9)
    status = posix.waitpid(child, 0)[1]
    try:
        if alone:
            posix.kill(-1, 9)
        while True:
            posix.waitpid(-1, 0)
    except OSError:  # no process is left
        return status


def run_script(code: Any, fds: list[int], with_errors: bool) -> None:
    """Run a program as __main__ with files as stdin and stdout.

    Afterwards the process ends as Python does, with threads, atexit and flush.
    """
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
    except BaseException:  # raised by the program's threads and handlers, or by a full stdout
        status = status or 1
    posix._exit(status)
