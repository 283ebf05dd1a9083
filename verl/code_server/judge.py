"""The process that runs the text of tests. It holds nothing of the program but stand-ins (`Remote`).

    supervisor --[tests, program]--> judge --a line for each outcome--> supervisor
    judge --(the program's code and a channel, for each test)--> prisoner --plain data--> judge

A test passes when its text ran to the end, no message was torn, and no comparison was the program's own word.
A judge serves many programs. A test that leaves nothing behind runs in its process, any other in a fork.
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

from verl.code_server.codec import Peer, TooLarge, Torn, escape, send_fds
from verl.code_server.plain import PLAIN_NODES, SAFE_BUILTINS, modules_if_plain, nodes_of
from verl.code_server.prisoner import end

GONE = "gone"  # outcome for the supervisor: the prisoner had ended before the test could begin
REPORTED = "reported"
SHARED_SECONDS = 0.5  # that one process may run tests: its limit of CPU time is that of one test
MAX_OUTPUT_BYTES = 1 << 20  # that all the outputs of such a process may have
MATH = frozenset(dir(__import__("math")))
ALIASES = {"np": "numpy", "pd": "pandas"}
PURE_NAMES = (
    "abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq itertools "
    "json math operator random re statistics string time typing"
)
PURE = frozenset(PURE_NAMES.split())
"""The prisoner says what the program's names are, and it may lie: so it may choose only between these
modules, and what they call by the same name. With `eval` for a name of a test it would be the judge."""
PACKAGES = frozenset(["numpy", "pandas", "scipy", "sympy"])
STATELESS_NAMES = "bisect cmath collections fractions heapq itertools math re string typing"
STATELESS = frozenset(STATELESS_NAMES.split())


class Remote:
    """Stands for an object of the program. Attributes, calls and iteration are messages to the prisoner; it
    equals no plain value, whatever its class says. Where two of them are compared the program's own word
    decides, which is noted: such a test does not pass.
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
        test.opaque = True
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
    """One test: its channel to the prisoner, the objects on both sides, and what happened."""

    def __init__(self, fd: int) -> None:
        self.peer = Peer(fd, self.serve, self.pack, self.unpack)
        self.callbacks: list[Any] = []
        self.mutations: list[tuple[Any, Any]] = []
        self.opaque = self.failed = False
        self.modules: set[str] = set()  # that the test's names come from
        self.answering = False  # a callback's result brings no class: `type` makes one that equals all

    def pack(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["h", object.__getattribute__(value, "_number")]
        if not callable(value) or self.answering and type(value) is not type(nodes_of):
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
            self.answering = True
            return result
        except AssertionError:  # whatever the program makes of it
            self.failed = True
            raise

    def ask(self, op: str, *args: Any) -> Any:
        """Asks the prisoner. Only `next` may end an iteration, or a call could end one of the test's."""
        self.answering = False
        try:
            return self.peer.request(op, *args)
        except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
            if op == "next":
                raise
            raise RuntimeError(f"the program raised {type(error).__name__}") from None

    def apply_mutations(self) -> None:
        """What a call did to its arguments becomes visible when the statement of the call has ended: not
        within `assert f(x) == sorted(x)`, where the program would choose both sides.
        """
        for before, now in self.mutations:
            before.clear()
            before.extend(now) if isinstance(before, list) else before.update(now)
        self.mutations.clear()

    def namespace(
        self, nodes: list[Any], modules: list[str] | None = None
    ) -> tuple[dict[str, Any], list[Any] | None]:
        """The names of the program that the test uses, and what loading the program raised.

        A builtin, a name of `math` or a module is the judge's own, whatever the program calls by its name;
        unless the test uses no other name of the program, which makes it the function under test.
        """
        used = {node.id for node in nodes if isinstance(node, _ast.Name)}
        bases = {
            n.value.id for n in nodes if isinstance(n, _ast.Attribute) and isinstance(n.value, _ast.Name)
        }
        used = {name for name in used if not (name.startswith("__") and name.endswith("__"))}
        problem, found = self.peer.request("lookup", sorted(used), modules)
        names: dict[str, Any] = {"__builtins__": dict(vars(builtins)), "__name__": "__test__"}
        doubtful: dict[str, Any] = {}
        for name, (kind, *where) in found.items():
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
        own = {"__builtins__", "__name__"}
        if all(name in own or isinstance(value, type(sys)) for name, value in names.items()):
            names.update(doubtful)
        else:
            math = __import__("math")
            names.update({name: getattr(math, name) for name in doubtful if not hasattr(builtins, name)})
        return names, problem

    def import_name(self, module: str, name: str) -> Any:
        """A module, or what it calls `name`; None where this process can't import it."""
        if not (isinstance(module, str) and all(part.isidentifier() for part in module.split("."))):
            raise Torn("not a module")
        self.modules.add(module)
        try:
            __import__(module)
            return getattr(sys.modules[module], name) if name else sys.modules[module]
        except Exception:  # a module may fail in its own way
            return None

    def is_plain(self, nodes: list[Any]) -> bool:
        """Whether the test can leave nothing behind but its own names."""
        for node in nodes:
            if isinstance(node, _ast.Import):
                self.modules.update(alias.name for alias in node.names)
            elif isinstance(node, _ast.ImportFrom):
                self.modules.add(str(node.module))
                self.modules.update(a.name for a in node.names if a.name in sys.stdlib_module_names)
            elif isinstance(node, _ast.Name):
                if node.id not in SAFE_BUILTINS and hasattr(builtins, node.id):
                    return False
            elif isinstance(node, _ast.Attribute):
                a_module = node.attr in sys.stdlib_module_names and node.attr != "copy"  # as in typing.sys
                if a_module or node.attr[0] == "_" or isinstance(node.ctx, _ast.Store):
                    return False
            elif node.__class__ not in PLAIN_NODES:
                return False
        return self.modules <= STATELESS


def apply_after_each_statement(nodes: list[Any]) -> None:
    """Puts a call of `__apply__` after each statement but the last one of all."""
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


class Processes:
    """Where the program runs: behind `link`, in a process for each test. modules: those of a program that
    leaves nothing behind (else None): its tests share a process for SHARED_SECONDS or until `until` is 0."""

    def __init__(self, link: _socket.socket, code: int, modules: list[str] | None) -> None:
        self.link = link
        self.code = code
        self.modules = modules
        self.until = 0.0
        self.channels: list[_socket.socket] = []  # of the last process, and of the one that may have to end

    def next_test(self) -> tuple[Test, bool]:
        """A test with its channel, and has its process run others before. OSError: there are no more."""
        reused = monotonic() < self.until
        if not reused:
            mine, theirs = _socket.socketpair()
            send_fds(self.link, b"f", [self.code, theirs.fileno()])
            theirs.close()
            self.channels = [*self.channels[-1:], mine]
            self.until = monotonic() + SHARED_SECONDS if self.modules is not None else 0.0
        return Test(self.channels[-1].fileno()), reused


class TestRunner:
    """Judges the tests of one program. Each line of the file `reports` is an outcome, the time on the
    monotonic clock and for stdio what the program printed: "loaded", then one for each test, in order."""

    def __init__(self, reports: int, alone: bool, lock: Callable[[], None]) -> None:
        self.reports = reports
        self.alone = alone
        self.lock = lock

    def report(self, outcome: str, output: str = "") -> None:
        posix.write(self.reports, f"{outcome} {monotonic()} {output}\n".encode())

    def judge(
        self, texts: list[str], program: str, stdio: bool, code: int, link: _socket.socket | None
    ) -> None:
        """Compiles the program to the file `code` and judges its tests. stdio: the texts are inputs, and the
        supervisor compares what the program prints, and sees to the tests that can't share a process."""
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
            self.run_tests(texts, Processes(link, code, modules))
        elif link is not None and modules is not None:
            self.run_inputs(texts, Processes(link, code, modules))

    def run_inputs(self, texts: list[str], processes: Processes) -> None:
        """Ends where the program fails, which it may not do in a process of its own, or where its process is
        gone, or its answer too large or strange."""
        left = MAX_OUTPUT_BYTES
        for text in texts:
            try:
                status, output = processes.next_test()[0].peer.request("run", text, processes.modules)
            except BaseException:
                return
            if status != 0 or type(output) is not bytes or len(output) > left:
                return
            left -= len(output)
            self.report("passed", escape(output.decode("latin1")))

    def run_tests(self, texts: list[str], processes: Processes) -> None:
        """A test that went wrong in a process with others before is run once more in one of its own."""
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
                    processes.until = 0.0
            if outcome != REPORTED:
                self.report(outcome)
            if outcome == GONE:
                return

    def run_test_text(self, test: Test, text: str, modules: list[str] | None, first: bool) -> str:
        """The outcome of a test; REPORTED: its fork has reported it. Torn: the prisoner had ended before."""
        try:
            nodes = nodes_of(compile(text, "<test>", "exec", 0x400, True))  # of the tree alone
            names, problem = test.namespace(nodes, modules)
        except Torn:
            raise
        except BaseException as error:  # of a test that is no Python, or of a strange reply
            return f"error:{type(error).__name__}"
        if first:
            self.report("loaded")
        if problem is not None:
            return "program_error" if problem[0] != "MemoryError" else "memory"
        if not test.is_plain(nodes):
            self.run_in_fork(test, nodes, names)
            return REPORTED
        outcome = run_test(test, nodes, names)
        names.clear()  # what a test held would last as long as its functions, which hold these names
        test.callbacks.clear()
        test.mutations.clear()
        return outcome

    def run_in_fork(self, test: Test, nodes: list[Any], names: dict[str, Any]) -> None:
        size = posix.fstat(self.reports).st_size
        child = posix.fork()
        if child == 0:
            self.lock()
            own = posix.getpid()
            fd = test.peer.fd
            # a fork of the test's own would mix its messages with the test's
            posix.register_at_fork(after_in_child=lambda: posix.dup2(0, fd))
            outcome = run_test(test, nodes, names)
            if posix.getpid() == own:  # no fork of the test's
                self.report(outcome)
            posix._exit(0)
        end(child, self.alone, wait=True)
        if posix.fstat(self.reports).st_size == size:
            self.report("crashed")
        if self.alone and posix.listdir("/tmp"):  # the next test gets a new judge
            posix._exit(0)


def run_test(test: Test, nodes: list[Any], names: dict[str, Any]) -> str:
    """The outcome of one test, given by the nodes of its tree."""
    torn: list[str] = []
    answer_next = test.peer.answer_next

    def answer_or_note() -> Any:  # a test that catches everything must not hide a torn message
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
    return "opaque_value" if outcome == "passed" and test.opaque else outcome
