"""The process that runs the text of tests.

It never holds the program. What the test asks of the program is evaluated in the prisoner, and comes back as
plain data (wire.py); everything else of the test, its comparisons above all, happens here.

    supervisor --[tests, program]--> judge --a line for each outcome--> supervisor
    judge --(the program's code and a channel, for each test)--> prisoner --plain data--> judge

A test that needs more than plain data runs inside the prisoner's process, with the program (inside.py). Its
verdict is marked so. Whether a test does is its own choice wherever possible, and not the program's: a
program that makes it necessary by what it returns has to return that inside, too.

A judge serves many programs. A test that leaves nothing behind runs in the judge's process, and any other in
a fork of it.
"""

from __future__ import annotations

import _ast
import _socket
import builtins
import marshal
import posix
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from verl.code_server.inside import COMPARISONS
from verl.code_server.plain import PLAIN_NODES, SAFE_BUILTINS, modules_if_plain, nodes_of
from verl.code_server.prisoner import end_processes
from verl.code_server.rewriting import Rewriting, chain_of
from verl.code_server.wire import NotPlain, Torn, ask, escape, send_fds

GONE = "gone"  # the outcome for the supervisor if the prisoner had ended before the test could begin
JUDGE_FAILED = "judge_failed"  # the outcome if the judge itself could not do its work
REPORTED = "reported"  # the result of a test whose fork has reported the outcome
# The time that one process may run tests. It is short because the limit of CPU time is that of one test.
SHARED_SECONDS = 0.5
MAX_OUTPUT_BYTES = 1 << 20  # the limit for all outputs of such a process
MATH = frozenset(dir(__import__("math")))
ALIASES = {"np": "numpy", "pd": "pandas"}
# Names of libraries by which a test may say what it expects. If a program has its own, the library's counts.
LIBRARY = dict.fromkeys(["Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"], "collections")
LIBRARY |= {"Decimal": "decimal", "Fraction": "fractions", "dumps": "json", "loads": "json"}
LIBRARY |= dict.fromkeys(["array", "allclose", "array_equal", "isclose"], "numpy")
LIBRARY |= dict.fromkeys(["date", "datetime", "timedelta"], "datetime")
PURE_NAMES = (
    "abc array bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq "
    "itertools json math numbers operator re statistics string time typing"
)
# The prisoner says what the program's names are, and it may lie. So it may choose only between these modules,
# and what they call by the same name. If it could give `eval` for a name of a test, it would be the judge.
PURE = frozenset(PURE_NAMES.split())
PACKAGES = frozenset(["numpy", "pandas", "scipy", "sympy"])
STATELESS_NAMES = "bisect cmath collections fractions heapq itertools math re string typing"
STATELESS = frozenset(STATELESS_NAMES.split())
# Attributes by which a test reaches the state of its process, which the program shares in plain Python.
STATEFUL = frozenset(
    [
        "seed",
        "random",
        "getcontext",
        "setcontext",
        "localcontext",
        "seterr",
        "errstate",
        "set_printoptions",
        "register",
    ]
)
INSIDE_NODES = (
    _ast.With, _ast.ClassDef, _ast.AsyncFunctionDef, _ast.AsyncFor, _ast.AsyncWith, _ast.Await, _ast.Global,
)  # fmt: skip


class Inside(BaseException):
    """The error that the test can't go on outside of the program's process."""


class Function:
    """A stand-in for a function of the program, which can be called and nothing else."""

    def __init__(self, test: Test, name: str) -> None:
        self.__dict__["call"] = lambda args, kwargs: test.evaluate(name, [["c", [*args], kwargs]])
        self.__dict__["leave"] = test.leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["call"](args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["leave"]("test")

    def __eq__(self, other: object) -> bool:
        return self.__dict__["leave"]("test")

    __hash__ = object.__hash__
    __setattr__ = __delattr__ = __eq__  # type: ignore[assignment,misc]


class Test:
    """One test outside of the program, with its channel to the prisoner.

    Attributes:
        changed: The arguments that calls have changed.
        answers: The program's values that can change.
        is_weak: Whether a comparison had both sides from the program, so that a pass says nothing.
        saw_empty: Whether an answer was an array without items, which is close to everything.
        reason: "" or the reason why the test has to run inside: "test" (the test itself asks for it), "value"
            (the program returned something that is not plain) or "error" (the test stumbled over a value).
        num_questions: The number of questions to the prisoner.
        saw_subclass: Whether something of the program's own class has crossed, which may have attributes.
        process: The id of the process that runs the test, or 0 while it is no process of its own.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.mutations: list[tuple[Any, Any]] = []
        self.changed: list[Any] = []
        self.answers: list[Any] = []
        self.is_weak = self.saw_empty = False
        self.reason = ""
        self.torn = self.saw_subclass = False
        self.num_questions = 0
        self.process = 0
        self.modules: set[str] = set()  # the modules that the test's names come from

    def leave(self, reason: str) -> Any:
        self.reason = self.reason or reason
        raise Inside(reason)

    def end_copies(self) -> None:
        """End this process if the test's text has forked it: a copy would read the answers of the test."""
        if self.process and self.process != posix.getpid():
            posix._exit(0)

    def evaluate(self, name: str, steps: list[Any]) -> Any:
        """Return what the attributes and calls of `steps` make of a name of the program.

        StopIteration and its like may not cross, because they would end an iteration of the test's.
        """
        self.end_copies()
        self.num_questions += 1
        try:
            value, changed, is_own = ask(self.fd, "evaluate", name, steps)
            self.saw_subclass |= is_own is True
            arguments = [argument for step in steps if step[0] == "c" for argument in step[1]]
            for index, now in changed:
                self.mutations.append((arguments[index], now))
            self.note_answer(value)
            return value
        except NotPlain as error:
            return self.leave("test" if error.args[0] == "question" else "value")
        except (StopIteration, StopAsyncIteration, GeneratorExit):
            return self.leave("error")
        except (ValueError, LookupError) as error:
            self.saw_subclass |= getattr(error, "is_subclass", False)
            raise
        except Torn:
            self.torn = True
            raise
        except BaseException as error:
            self.saw_subclass |= getattr(error, "is_subclass", False)
            raise

    def note_answer(self, answer: Any) -> None:
        if isinstance(answer, list | dict | set):
            self.answers.append(answer)
        elif type(answer).__name__ == "ndarray" and answer.size == 0:
            self.saw_empty = True

    def compare(self, operation: str, left: Any, right: Any) -> Any:
        """Compare two values, and note whether the program has made both.

        Then one is an answer, and the other an argument that a call has changed.
        """
        for one, other in ((left, right), (right, left)) if self.changed else ():
            is_answer = any(one is answer for answer in self.answers)
            self.is_weak |= is_answer and any(other is argument for argument in self.changed)
        return COMPARISONS[operation](left, right)

    def apply_mutations(self) -> None:
        """Make visible what calls have done to their arguments.

        This happens when the statement of a call has ended. Within a statement such as
        `assert f(x) == sorted(x)` the program would otherwise choose both sides.
        """
        for before, now in self.mutations:
            if type(before) is not type(now):
                raise Torn("an argument of another type")
            if type(before).__module__ == "numpy":
                if before.shape != now.shape or before.dtype != now.dtype:
                    raise Torn("an argument of another shape")
                before[...] = now
                continue
            if not differ(before, now):
                continue
            self.changed.append(before)
            if isinstance(before, list | bytearray):
                before[:] = now
            else:
                before.clear()
                before.extend(now) if hasattr(before, "extend") else before.update(now)
        self.mutations.clear()

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


def differ(before: Any, now: Any) -> bool:
    """Return whether a call has changed an argument."""
    same = before == now
    return not (same if type(same) is bool else same.all())


class Names:
    """The names of the program that a test uses, and what each stands for.

    Attributes:
        kinds: For each such name "function", "class" or "value".
        judges: The names that the judge itself provides: modules, and what libraries call by that name.
        is_doubtful: Whether one of these is the program's own name.
        problem: The name of the exception that loading the program has raised, or "".
    """

    def __init__(self, test: Test, nodes: list[Any], modules: list[str] | None) -> None:
        """Load the program.

        Args:
            test: The test.
            nodes: The nodes of the test's tree.
            modules: The modules of a plain program. None if the program is not plain.
        """
        loads = {node.id for node in nodes if node.__class__ is _ast.Name}
        used = {name for name in loads if not (name.startswith("__") and name.endswith("__"))}
        problem, sources = ask(test.fd, "load", sorted(used), modules, *imports_and_attributes(nodes))
        bases = {
            node.value.id
            for node in nodes
            if node.__class__ is _ast.Attribute and node.value.__class__ is _ast.Name
        }
        self.problem = problem
        self.kinds: dict[str, str] = {}
        self.judges: dict[str, Any] = {}
        self.is_doubtful = False
        doubtful = dict[str, str]()
        for name, (kind, module) in sources.items():
            if name not in used or kind not in ("module", "function", "class", "value"):
                raise Torn("not a name that was asked for")
            whole = kind == "module" and module.partition(".")[0] in PURE | PACKAGES
            if name in bases and (name in sys.stdlib_module_names or name in ALIASES):
                self.is_doubtful |= kind != "module"
                self.judges[name] = test.import_name(ALIASES.get(name, name), "")
            elif whole:
                self.judges[name] = test.import_name(module, "")
            elif module in PURE and hasattr(sys.modules.get(module), name):
                self.judges[name] = test.import_name(module, name)
            elif kind == "module":
                self.kinds[name] = "value"
            elif hasattr(builtins, name) or name in MATH or name in LIBRARY:
                doubtful[name] = kind
            else:
                self.kinds[name] = kind
        if not self.kinds:  # the program's own name is what is tested
            self.kinds = doubtful
            return
        for name, kind in doubtful.items():
            if hasattr(builtins, name):
                module = "builtins"
            elif name in MATH:
                module = "math"
            else:
                module = LIBRARY[name]
            value = test.import_name(module, name)
            self.is_doubtful = True
            if value is None:
                self.kinds[name] = kind
            else:
                self.judges[name] = value


def must_be_inside(nodes: list[Any], kinds: dict[str, str], program_names: frozenset[str]) -> bool:
    """Return whether a test, by its own text, needs the program's process.

    Args:
        nodes: The nodes of the test's tree.
        kinds: What the program's names stand for.
        program_names: The names that the program's code looks up in its module.
    """
    in_chains: set[int] = set()
    for node in nodes:
        kind = node.__class__
        if kind in INSIDE_NODES:
            return True
        if kind is _ast.Import and any(
            alias.name.partition(".")[0] not in PURE | PACKAGES for alias in node.names
        ):
            return True
        if kind is _ast.ImportFrom and str(node.module).partition(".")[0] not in PURE | PACKAGES:
            return True
        if kind is _ast.Attribute and (
            node.attr in STATEFUL or node.attr[:2] == "__" or node.ctx.__class__ is not _ast.Load
        ):
            return True
        if kind is _ast.Compare and any(op.__class__ in (_ast.Is, _ast.IsNot) for op in node.ops):
            sides = [node.left, *node.comparators]
            if not any(
                side.__class__ is _ast.Constant or getattr(side, "id", "") in SAFE_BUILTINS for side in sides
            ):
                return True
        if kind in (_ast.Call, _ast.Attribute) and id(node) not in in_chains:
            chain = chain_of(node, kinds)
            if chain is not None:
                name, steps = chain
                in_chains.update(id(step) for step in steps)
                in_chains.add(id(steps[0].func if steps[0].__class__ is _ast.Call else steps[0].value))
                if kinds[name] == "class" and len(steps) == 1 and steps[0].__class__ is _ast.Call:
                    return True
        if kind is _ast.Name:
            if node.ctx.__class__ is not _ast.Load:
                if node.id in program_names or kinds.get(node.id, "function") != "function":
                    return True
            elif kinds.get(node.id) == "class" and id(node) not in in_chains:
                return True
        if kind is _ast.FunctionDef and (node.name in program_names or node.decorator_list):
            return True
    return False


def imports_and_attributes(nodes: list[Any]) -> list[list[str]]:
    imports = {alias.name for node in nodes if node.__class__ is _ast.Import for alias in node.names}
    imports |= {str(node.module) for node in nodes if node.__class__ is _ast.ImportFrom}
    attributes = {node.attr for node in nodes if node.__class__ is _ast.Attribute}
    attributes |= {alias.name for node in nodes if node.__class__ is _ast.ImportFrom for alias in node.names}
    return [sorted(imports), sorted(attributes)]


def global_names(code: Any) -> frozenset[str]:
    """Return the names that a program's code and its functions look up outside of themselves."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is type(code):
            names |= global_names(constant)
    return frozenset(names)


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

    def own_test(self, nodes: list[Any]) -> Test:
        """Return a test with a process of its own that has loaded the program.

        Raises Torn or OSError if there is none.
        """
        self.reuse_until = 0.0
        test, _ = self.next_test()
        self.reuse_until = 0.0
        ask(test.fd, "load", [], None, *imports_and_attributes(nodes))
        return test


class TestRunner:
    """A judge of the tests of one program.

    Each line of the file `reports` is an outcome, the time on the monotonic clock, and a text: for stdio the
    output of the program, and for asserts "inside" if the verdict was made there. The first line is "loaded".
    Then there is one line for each test, in order.
    """

    def __init__(self, reports: int, alone: bool, lock: Callable[[], None]) -> None:
        self.reports = reports
        self.alone = alone
        self.lock = lock
        self.program_names: frozenset[str] = frozenset()

    def report(self, outcome: str, text: str = "") -> None:
        posix.write(self.reports, f"{outcome} {monotonic()} {text}\n".encode())

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
            compiled = compile(program, "<program>", "exec", 0, True)
            posix.write(code, marshal.dumps(compiled))
        except BaseException as error:  # SyntaxError, ValueError, MemoryError, RecursionError
            for _ in texts or [""]:
                self.report("memory" if isinstance(error, MemoryError) else "program_error")
            return
        modules = modules_if_plain(program) if len(texts) > 1 else None
        if stdio:
            self.report("loaded")
        if link is not None and not stdio:
            self.program_names = global_names(compiled)
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
                status, output = ask(processes.next_test()[0].fd, "run_text", text, processes.modules)
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
            outcome = where = ""
            reused = True
            while reused and outcome not in ("passed", "failed", REPORTED):
                reused = False
                try:
                    test, reused = processes.next_test()
                except OSError:
                    outcome = JUDGE_FAILED
                    break
                try:
                    outcome, where = self.run_test_text(test, text, processes, first=index == 0)
                except Torn:
                    outcome = GONE
                if outcome not in ("passed", "failed") or where:
                    processes.reuse_until = 0.0
            if outcome != REPORTED:
                self.report(outcome, where)
            if outcome in (GONE, JUDGE_FAILED):
                return

    def run_test_text(
        self, test: Test, text: str, processes: ProgramProcesses, first: bool
    ) -> tuple[str, str]:
        """Run a test and return its outcome (or REPORTED) and "inside" if the verdict was made there.

        Raises Torn if the prisoner had ended before the test could begin.
        """
        try:
            nodes = nodes_of(compile(text, "<test>", "exec", 0x400, True))  # makes the tree alone
            names = Names(test, nodes, processes.modules)
        except Torn:
            raise
        except BaseException as error:  # raised for a test that is no Python, or by a strange reply
            return f"error:{type(error).__name__}", ""
        if first:
            self.report("loaded")
        if names.problem:
            return ("memory" if names.problem == "MemoryError" else "program_error"), ""
        kinds = names.kinds
        if must_be_inside(nodes, kinds, self.program_names):
            if processes.modules is not None:  # a shared process would keep what the test leaves
                test = processes.own_test(nodes)
            return run_inside(test, text, names), "inside"
        if not test.is_plain(nodes):
            self.run_in_fork(test, nodes, text, names, processes)
            return REPORTED, ""
        return run_outside_or_inside(test, nodes, text, names, processes)

    def run_in_fork(self, test: Test, *given: Any) -> None:
        size = posix.fstat(self.reports).st_size
        child = posix.fork()
        if child == 0:
            self.lock()
            test.process = posix.getpid()
            outcome = run_outside_or_inside(test, *given)
            test.end_copies()
            self.report(*outcome)
            posix._exit(0)
        end_processes(child, self.alone, wait=True)
        if posix.fstat(self.reports).st_size == size:
            self.report("crashed")
        if self.alone and posix.listdir("/tmp"):  # the next test gets a new judge
            posix._exit(0)


def run_outside_or_inside(
    test: Test, nodes: list[Any], text: str, names: Names, processes: ProgramProcesses
) -> tuple[str, str]:
    outcome = run_outside(test, nodes, names)
    if not test.reason and names.is_doubtful and outcome != "passed":
        test.reason = "error"
    if not test.reason or test.torn:
        return outcome, ""
    fresh = processes.own_test(nodes)
    value = test.num_questions if test.reason == "value" else 0
    is_doubtful = names.is_doubtful or test.reason == "error" and not test.saw_subclass
    return run_inside(fresh, text, names, value, is_doubtful), "inside"


def run_outside(test: Test, nodes: list[Any], names: Names) -> str:
    """Run one test in this process, and return its outcome.

    The nodes are those of its tree, which is changed.
    """
    namespace: dict[str, Any] = {"__builtins__": dict(vars(builtins)), "__name__": "__test__", **names.judges}
    namespace |= {name: Function(test, name) for name, kind in names.kinds.items() if kind == "function"}
    namespace |= {"evaluate ": test.evaluate, "apply ": test.apply_mutations, "compare ": test.compare}
    outcome = "passed"
    try:
        tree = Rewriting(names.kinds, nodes, inside=False).rewrite(nodes[0])
        exec(compile(tree, "<test>", "exec", 0, True), namespace)
    except AssertionError:
        outcome = "failed"
        if any(differ(before, now) for before, now in test.mutations):
            test.saw_subclass = False
            test.reason = "error"  # in plain Python the statement sees what its calls have changed
    except MemoryError:
        outcome = "memory"
    except Torn:
        outcome = "crashed"
    except Inside:
        outcome = "opaque_value"
    except BaseException as error:  # any way of not reaching the end is a failure
        outcome = f"error:{type(error).__name__}"
        is_own = getattr(error, "is_subclass", None) is None
        if is_own and not isinstance(error, SyntaxError | NameError | RecursionError) and test.num_questions:
            test.reason = test.reason or "error"
            test.saw_subclass &= isinstance(error, AttributeError)
    if test.torn:
        return "crashed"
    is_weak = test.is_weak or test.saw_empty and not any(getattr(node, "elts", [0]) == [] for node in nodes)
    # The objects of a test would otherwise last as long as its functions, which hold these names.
    namespace.clear()
    test.mutations.clear()
    return "opaque_value" if is_weak and outcome == "passed" else outcome


def run_inside(test: Test, text: str, names: Names, value: int = 0, is_doubtful: bool = False) -> str:
    """Run one test in the program's process, and return its outcome.

    Args:
        test: The test, whose process has loaded the program.
        text: The text of the test.
        names: The program's names that the test uses.
        value: The number of the question whose answer was not plain, or 0. It may not be plain inside either.
        is_doubtful: Whether a pass says nothing, because a program may have passed there by reading the test.
    """
    nodes = nodes_of(compile(text, "<test>", "exec", 0x400, True))
    tree = Rewriting(names.kinds, nodes, inside=True).rewrite(nodes[0])
    code = marshal.dumps(compile(tree, "<test>", "exec", 0, True))
    classes = sorted(
        {node.id for node in nodes if isinstance(node, _ast.Name)}
        | {node.name for node in nodes if isinstance(node, _ast.ClassDef)}
    )
    nonce = int.from_bytes(posix.urandom(7), "little")
    try:
        returned_nonce, outcome = ask(test.fd, "test", nonce, code, classes, value)
    except BaseException:  # the process has ended, or its answer is none
        return "crashed"
    if returned_nonce != nonce or type(outcome) is not str:
        return "crashed"
    return "opaque_value" if outcome == "passed" and is_doubtful else outcome
