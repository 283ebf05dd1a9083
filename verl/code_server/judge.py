"""The process that runs the text of tests.

It holds nothing of the program but stand-ins (`Remote`).

    supervisor --[tests, program]--> judge --a line for each outcome--> supervisor
    judge --(the program's code and a channel, for each test)--> prisoner --plain data--> judge

A test passes if its text ran to the end, no message was torn, and no comparison rests on the program's own
word. A judge serves many programs. A test that leaves nothing behind runs in the judge's process, and any
other in a fork of it.
"""

from __future__ import annotations

import _ast
import _socket
import builtins
import marshal
import posix
import sys
from collections.abc import Callable, Iterator
from functools import partialmethod
from time import monotonic
from typing import Any

from verl.code_server.plain import PLAIN_NODES, SAFE_BUILTINS, modules_if_plain, nodes_of
from verl.code_server.prisoner import end_processes
from verl.code_server.wire import Peer, TooLarge, Torn, escape, send_fds

GONE = "gone"  # the outcome for the supervisor if the prisoner had ended before the test could begin
REPORTED = "reported"  # the result of a test whose fork has reported the outcome
# The time that one process may run tests. It is short because the limit of CPU time is that of one test.
SHARED_SECONDS = 0.5
MAX_OUTPUT_BYTES = 1 << 20  # the limit for all outputs of such a process
MATH = frozenset(dir(__import__("math")))
ALIASES = {"np": "numpy", "pd": "pandas"}
PURE_NAMES = (
    "abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq itertools "
    "json math operator random re statistics string time typing"
)
# The prisoner says what the program's names are, and it may lie. So it may choose only between these modules,
# and what they call by the same name. If it could give `eval` for a name of a test, it would be the judge.
PURE = frozenset(PURE_NAMES.split())
PACKAGES = frozenset(["numpy", "pandas", "scipy", "sympy"])
STATELESS_NAMES = "bisect cmath collections fractions heapq itertools math re string typing"
STATELESS = frozenset(STATELESS_NAMES.split())


class Remote:
    """A stand-in for an object of the program.

    Attributes, calls and iteration are messages to the prisoner. A stand-in equals no plain value, whatever
    its class says. If two stand-ins are compared, the program's own word decides. That is noted, and such a
    test does not pass.
    """

    def __init__(self, test: Test, number: int) -> None:
        object.__setattr__(self, "_test", test)
        object.__setattr__(self, "_number", number)

    def _ask(self, op: str, *args: Any) -> Any:
        return object.__getattribute__(self, "_test").ask(op, self, *args)

    def _ask_plain(self, op: str, kind: type) -> Any:
        value = self._ask(op)
        if type(value) is not kind:
            raise TypeError(f"{op} of the object is no {kind.__name__}")
        return value

    def _compare(self, op: str, other: Any) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented
        test = object.__getattribute__(self, "_test")
        test.compared_remotely = True
        return self._ask(op, other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        test = object.__getattribute__(self, "_test")
        result, after = test.ask("call", self, list(args), kwargs)
        if type(after) is list and len(after) == len(args):
            for before, now in zip(args, after, strict=True):
                if now is not None and type(before) is type(now) and type(now) in (list, dict, set):
                    test.mutations.append((before, now))
        return result

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return self._ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", key, value)

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_number")

    def __instancecheck__(self, instance: Any) -> Any:
        return isinstance(instance, Remote) and instance._compare("isinstance", self)

    def __eq__(self, other: Any) -> Any:
        return self._compare("eq", other) if isinstance(other, Remote) else False


for _name, _kind in {"len": int, "bool": bool, "str": str, "repr": str}.items():
    setattr(Remote, f"__{_name}__", partialmethod(Remote._ask_plain, _name, _kind))
for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul"):
    setattr(Remote, f"__{_name}__", partialmethod(Remote._compare, _name))


class Test:
    """One test, with its channel to the prisoner, the objects on both sides, and what happened in it."""

    def __init__(self, fd: int) -> None:
        self.peer = Peer(fd, self.serve, self.pack, self.unpack)
        self.callbacks: list[Any] = []
        self.mutations: list[tuple[Any, Any]] = []
        self.compared_remotely = self.failed = False
        self.modules: set[str] = set()  # the modules that the test's names come from
        # Whether the result of a callback is being packed. It may not bring a class to the program, as `type`
        # makes one that equals everything.
        self.packs_callback_result = False

    def pack(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["h", object.__getattribute__(value, "_number")]
        if not callable(value) or self.packs_callback_result and type(value) is not type(nodes_of):
            raise TypeError(f"a {type(value).__name__} can't be given to the program")
        self.callbacks.append(value)
        return ["c", len(self.callbacks) - 1]

    def unpack(self, tag: str, number: int) -> Any:
        return Remote(self, number) if tag == "h" else self.callbacks[number]

    def serve(self, op: str, *args: Any) -> Any:
        number, values = args
        if op != "callback" or type(number) is not int or number < 0:
            raise Torn("not a message")
        try:
            result = self.callbacks[number](*values)
            self.packs_callback_result = True
            return result
        except AssertionError:  # the test has failed, whatever the program makes of the error
            self.failed = True
            raise

    def ask(self, op: str, *args: Any) -> Any:
        """Ask the prisoner and return its answer.

        Only `next` may end an iteration. Otherwise a call could end an iteration of the test's.
        """
        self.packs_callback_result = False
        try:
            return self.peer.request(op, *args)
        except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
            if op == "next":
                raise
            raise RuntimeError(f"the program raised {type(error).__name__}") from None

    def apply_mutations(self) -> None:
        """Make visible what calls have done to their arguments.

        This happens when the statement of a call has ended. Within a statement such as
        `assert f(x) == sorted(x)` the program would otherwise choose both sides.
        """
        for before, now in self.mutations:
            before.clear()
            before.extend(now) if isinstance(before, list) else before.update(now)
        self.mutations.clear()

    def namespace(
        self, nodes: list[Any], modules: list[str] | None = None
    ) -> tuple[dict[str, Any], list[Any] | None]:
        """Return the names of the program that the test uses, and the exception of loading the program.

        A builtin, a name of `math` or a module is the judge's own, whatever the program calls by that name.
        It is the program's only if the test uses no other name of the program, because it is then the
        function under test.

        Args:
            nodes: The nodes of the test's tree.
            modules: The modules of a plain program. None if the program is not plain.
        """
        used = {node.id for node in nodes if isinstance(node, _ast.Name)}
        bases = {
            node.value.id
            for node in nodes
            if isinstance(node, _ast.Attribute) and isinstance(node.value, _ast.Name)
        }
        used = {name for name in used if not (name.startswith("__") and name.endswith("__"))}
        problem, sources = self.peer.request("lookup", sorted(used), modules)
        names: dict[str, Any] = {"__builtins__": dict(vars(builtins)), "__name__": "__test__"}
        doubtful: dict[str, Any] = {}
        for name, (kind, *where) in sources.items():
            if name not in used:
                raise Torn("a name that was not asked for")
            if hasattr(builtins, name):
                if kind != "module":
                    doubtful[name] = where[0]
            elif name in bases and (name in sys.stdlib_module_names or name in ALIASES):
                names[name] = self.import_name(ALIASES.get(name, name), "")
            elif kind == "module":
                module, attribute = where
                whole = attribute == "" and str(module).partition(".")[0] in PURE | PACKAGES
                if whole or (attribute == name and module in PURE):
                    names[name] = self.import_name(module, attribute)
            elif name in MATH:
                doubtful[name] = where[0]
            else:
                names[name] = where[0]
        judges_names = {"__builtins__", "__name__"}
        if all(name in judges_names or isinstance(value, type(sys)) for name, value in names.items()):
            names.update(doubtful)
        else:
            math = __import__("math")
            names.update({name: getattr(math, name) for name in doubtful if not hasattr(builtins, name)})
        return names, problem

    def import_name(self, module: str, name: str) -> Any:
        """Import a module, or what it calls `name`.

        Returns None if this process can't import it.
        """
        if not (isinstance(module, str) and all(component.isidentifier() for component in module.split("."))):
            raise Torn("not a module")
        self.modules.add(module)
        try:
            __import__(module)
            return getattr(sys.modules[module], name) if name else sys.modules[module]
        except Exception:  # a module may fail in its own way
            return None

    def is_plain(self, nodes: list[Any]) -> bool:
        """Return whether the test can leave nothing behind but its own names."""
        for node in nodes:
            if isinstance(node, _ast.Import):
                self.modules.update(alias.name for alias in node.names)
            elif isinstance(node, _ast.ImportFrom):
                self.modules.add(str(node.module))
                self.modules.update(
                    alias.name for alias in node.names if alias.name in sys.stdlib_module_names
                )
            elif isinstance(node, _ast.Name):
                if node.id not in SAFE_BUILTINS and hasattr(builtins, node.id):
                    return False
            elif isinstance(node, _ast.Attribute):
                is_module = node.attr in sys.stdlib_module_names and node.attr != "copy"  # as in typing.sys
                if is_module or node.attr[0] == "_" or isinstance(node.ctx, _ast.Store):
                    return False
            elif node.__class__ not in PLAIN_NODES:
                return False
        return self.modules <= STATELESS


def apply_after_each_statement(nodes: list[Any]) -> None:
    """Insert a call of `__apply__` after each statement but the last one of all."""
    for node in nodes:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):
                continue
            for i in range(len(statements) - (node is nodes[0]), 0, -1):
                last = statements[i - 1]
                line = dict.fromkeys(("lineno", "end_lineno"), last.lineno)
                line |= dict.fromkeys(("col_offset", "end_col_offset"), 0)
                call = _ast.Call(_ast.Name("__apply__", _ast.Load(), **line), [], [], **line)
                statements.insert(i, _ast.Expr(call, **line))


class ProgramProcesses:
    """The processes in which a program runs, one for each test, behind `link`.

    The tests of a program that leaves nothing behind share a process for SHARED_SECONDS, or until
    `reuse_until` is set to 0.

    Args:
        link: The socket to the prisoner.
        code: The file with the program's code.
        modules: The modules of a program that leaves nothing behind. None for any other program.
    """

    def __init__(self, link: _socket.socket, code: int, modules: list[str] | None) -> None:
        self.link = link
        self.code = code
        self.modules = modules
        self.reuse_until = 0.0
        # The channel of the last process, and before it that of a process that may still have to end.
        self.channels: list[_socket.socket] = []

    def next_test(self) -> tuple[Test, bool]:
        """Return a test with its channel, and whether its process has run other tests before.

        Raises OSError if there are no more processes.
        """
        reused = monotonic() < self.reuse_until
        if not reused:
            judge_end, prisoner_end = _socket.socketpair()
            send_fds(self.link, b"f", [self.code, prisoner_end.fileno()])
            prisoner_end.close()
            self.channels = [*self.channels[-1:], judge_end]
            self.reuse_until = monotonic() + SHARED_SECONDS if self.modules is not None else 0.0
        return Test(self.channels[-1].fileno()), reused


class TestRunner:
    """A judge of the tests of one program.

    Each line of the file `reports` is an outcome, the time on the monotonic clock, and for stdio the output
    of the program. The first line is "loaded". Then there is one line for each test, in order.
    """

    def __init__(self, reports: int, alone: bool, lock: Callable[[], None]) -> None:
        self.reports = reports
        self.alone = alone
        self.lock = lock

    def report(self, outcome: str, output: str = "") -> None:
        posix.write(self.reports, f"{outcome} {monotonic()} {output}\n".encode())

    def judge(
        self, texts: list[str], program: str, stdio: bool, code: int, link: _socket.socket | None
    ) -> None:
        """Compile the program to the file `code` and judge its tests.

        Args:
            texts: The texts of the tests, or the inputs with `stdio`.
            program: The text of the program.
            stdio: Whether the supervisor compares what the program prints. The supervisor then also takes
                care of the tests that can't share a process.
            code: The file for the program's code.
            link: The socket to the prisoner. None to compile only.
        """
        try:
            posix.write(code, marshal.dumps(compile(program, "<program>", "exec", 0, True)))
        except BaseException as error:  # SyntaxError, ValueError, MemoryError, RecursionError
            for _ in texts or [""]:
                self.report("memory" if isinstance(error, MemoryError) else "program_error")
            return
        modules = modules_if_plain(program) if len(texts) > 1 else None
        if stdio:
            self.report("loaded")
        if link is not None and not stdio:
            self.run_assert_tests(texts, ProgramProcesses(link, code, modules))
        elif link is not None and modules is not None:
            self.run_stdio_tests(texts, ProgramProcesses(link, code, modules))

    def run_stdio_tests(self, texts: list[str], processes: ProgramProcesses) -> None:
        """Run the program with each input in shared processes, as long as all goes well.

        It stops where the program fails (it may succeed in a process of its own), where its process is gone,
        and where its answer is too large or has another shape.
        """
        num_bytes_left = MAX_OUTPUT_BYTES
        for text in texts:
            try:
                status, output = processes.next_test()[0].peer.request("run", text, processes.modules)
            except BaseException:
                return
            if status != 0 or type(output) is not bytes or len(output) > num_bytes_left:
                return
            num_bytes_left -= len(output)
            self.report("passed", escape(output.decode("latin1")))

    def run_assert_tests(self, texts: list[str], processes: ProgramProcesses) -> None:
        """Run the tests and report their outcomes.

        A test that went wrong in a process that had run others is run once more in a process of its own.
        """
        for index, text in enumerate(texts):
            outcome = ""
            reused = True
            while reused and outcome not in ("passed", "failed", REPORTED):
                reused = False
                try:
                    test, reused = processes.next_test()
                    outcome = self.run_test_text(test, text, processes.modules, first=index == 0)
                except (OSError, Torn):
                    outcome = GONE
                if outcome not in ("passed", "failed"):
                    processes.reuse_until = 0.0
            if outcome != REPORTED:
                self.report(outcome)
            if outcome == GONE:
                return

    def run_test_text(self, test: Test, text: str, modules: list[str] | None, first: bool) -> str:
        """Run a test and return its outcome, or REPORTED if its fork has reported the outcome.

        Raises Torn if the prisoner had ended before the test could begin.
        """
        try:
            nodes = nodes_of(compile(text, "<test>", "exec", 0x400, True))  # makes the tree alone
            names, problem = test.namespace(nodes, modules)
        except Torn:
            raise
        except BaseException as error:  # raised for a test that is no Python, or by a strange reply
            return f"error:{type(error).__name__}"
        if first:
            self.report("loaded")
        if problem is not None:
            return "program_error" if problem[0] != "MemoryError" else "memory"
        if not test.is_plain(nodes):
            self.run_in_fork(test, nodes, names)
            return REPORTED
        outcome = run_test(test, nodes, names)
        # The objects of a test would otherwise last as long as its functions, which hold these names.
        names.clear()
        test.callbacks.clear()
        test.mutations.clear()
        return outcome

    def run_in_fork(self, test: Test, nodes: list[Any], names: dict[str, Any]) -> None:
        size = posix.fstat(self.reports).st_size
        child = posix.fork()
        if child == 0:
            self.lock()
            pid = posix.getpid()
            fd = test.peer.fd
            # A fork that the test itself makes would otherwise mix its messages with the test's.
            posix.register_at_fork(after_in_child=lambda: posix.dup2(0, fd))
            outcome = run_test(test, nodes, names)
            if posix.getpid() == pid:  # this is no fork that the test has made
                self.report(outcome)
            posix._exit(0)
        end_processes(child, self.alone, wait=True)
        if posix.fstat(self.reports).st_size == size:
            self.report("crashed")
        if self.alone and posix.listdir("/tmp"):  # the next test gets a new judge
            posix._exit(0)


def run_test(test: Test, nodes: list[Any], names: dict[str, Any]) -> str:
    """Run one test, given by the nodes of its tree, and return its outcome."""
    torn: list[str] = []
    answer_next = test.peer.answer_next

    def answer_or_note() -> Any:  # so that a test that catches everything can't hide a torn message
        try:
            return answer_next()
        except Torn as error:
            torn.append("output_limit" if isinstance(error, TooLarge) else "crashed")
            raise

    test.peer.answer_next = answer_or_note  # type: ignore[method-assign]
    names["__apply__"] = test.apply_mutations
    outcome = "passed"
    try:
        apply_after_each_statement(nodes)
        exec(compile(nodes[0], "<test>", "exec", 0, True), names)
    except AssertionError:
        outcome = "failed"
    except MemoryError:
        outcome = "memory"
    except BaseException as error:  # any way of not reaching the end is a failure
        outcome = f"error:{type(error).__name__}"
    if torn:
        return torn[0]
    if test.failed:
        return "failed"
    return "opaque_value" if outcome == "passed" and test.compared_remotely else outcome
