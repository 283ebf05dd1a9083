"""The process that runs the text of tests. It holds nothing of the program but stand-ins (`Remote`).

    supervisor --[nonce, tests]--> judge --(index, outcome; first "loaded")--> supervisor
    judge --(one channel per test)--> prisoner --plain data--> judge

A test passes when its text ran to the end, no message was torn, and no comparison was the program's own word.
A test of plain asserts runs in this process, any other in a fork, so that nothing of it reaches the next one.
"""

from __future__ import annotations

import _ast
import _socket
import builtins
import posix
import sys
from collections.abc import Iterator
from typing import Any

from verl.code_server.codec import Peer, TooLarge, Torn, send_fds

GONE = "gone"  # outcome for the supervisor: the prisoner had ended before the test could begin
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
SAFE_NAMES = (
    "abs all any bin bool bytes chr complex dict divmod enumerate filter float frozenset hash hex int "
    "isinstance issubclass iter len list map max min next oct ord pow range repr reversed round set "
    "slice sorted str sum tuple type zip Exception ValueError TypeError KeyError IndexError "
    "NotImplemented Ellipsis"
)
SAFE_BUILTINS = frozenset(SAFE_NAMES.split())
PLAIN_NAMES = (
    "Module Assert Expr Assign Name Constant Call keyword Compare BoolOp BinOp UnaryOp IfExp List Tuple "
    "Dict Set Attribute Subscript Slice Starred JoinedStr FormattedValue GeneratorExp ListComp SetComp "
    "DictComp comprehension Lambda arguments arg operator cmpop boolop unaryop expr_context"
)
PLAIN_NODES = tuple(getattr(_ast, name) for name in PLAIN_NAMES.split())


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
        if not isinstance(iterator, Remote):
            return iter(iterator)
        return RemoteIterator(iterator)

    def __next__(self) -> Any:
        return self._ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", key, value)

    def __len__(self) -> int:
        return self._ask_plain("len", int)

    def __bool__(self) -> bool:
        return self._ask_plain("bool", bool)

    def __str__(self) -> str:
        return self._ask_plain("str", str)

    def __repr__(self) -> str:
        return self._ask_plain("repr", str)

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_number")

    def __instancecheck__(self, instance: Any) -> Any:
        return isinstance(instance, Remote) and instance._compare("isinstance", self)

    def __eq__(self, other: Any) -> Any:
        return self._compare("eq", other) if isinstance(other, Remote) else False

    def __lt__(self, other: Any) -> Any:
        return self._compare("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare("ge", other)

    def __add__(self, other: Any) -> Any:
        return self._compare("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._compare("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._compare("mul", other)


class RemoteIterator:
    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        return self.remote._ask("next")


class Test:
    """One test: its channel to the prisoner, the objects on both sides, and what happened."""

    def __init__(self, fd: int) -> None:
        self.peer = Peer(fd, self.serve, self.pack, self.unpack)
        self.callbacks: list[Any] = []
        self.mutations: list[tuple[Any, Any]] = []
        self.opaque = self.failed = False
        self.answering = (
            False  # a callback's result: it brings no class, or `type` could make one that equals all
        )

    def pack(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["h", object.__getattribute__(value, "_number")]
        if not callable(value) or self.answering and type(value) is not type(walk):
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

    def namespace(self, tree: _ast.Module) -> tuple[dict[str, Any], list[Any] | None]:
        """The names of the program that the test uses, and what loading the program raised.

        A builtin, a name of `math` or a module is the judge's own, whatever the program calls by its name;
        unless the test uses no other name of the program, which makes it the function under test.
        """
        nodes = list(walk(tree))
        used = {node.id for node in nodes if isinstance(node, _ast.Name)}
        bases = {
            n.value.id for n in nodes if isinstance(n, _ast.Attribute) and isinstance(n.value, _ast.Name)
        }
        used = {name for name in used if not (name.startswith("__") and name.endswith("__"))}
        problem, found = self.peer.request("lookup", sorted(used))
        names: dict[str, Any] = {"__builtins__": dict(vars(builtins)), "__name__": "__test__"}
        doubtful: dict[str, Any] = {}
        for name, (kind, *where) in found.items():
            if name not in used:
                raise Torn("a name that was not asked for")
            if hasattr(builtins, name):
                if kind != "module":
                    doubtful[name] = where[0]
            elif name in bases and (name in sys.stdlib_module_names or name in ALIASES):
                names[name] = import_name(ALIASES.get(name, name), "")
            elif kind == "module":
                module, attribute = where
                whole = attribute == "" and str(module).partition(".")[0] in PURE | PACKAGES
                if whole or (attribute == name and module in PURE):
                    names[name] = import_name(module, attribute)
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


def import_name(module: str, name: str) -> Any:
    """A module, or what it calls `name`; None where this process can't import it."""
    if not (isinstance(module, str) and all(part.isidentifier() for part in module.split("."))):
        raise Torn("not a module")
    try:
        __import__(module)
        return getattr(sys.modules[module], name) if name else sys.modules[module]
    except Exception:  # a module may fail in its own way
        return None


def walk(node: Any) -> Iterator[Any]:
    yield node
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, _ast.AST):
                yield from walk(child)


def is_plain(tree: _ast.Module, names: dict[str, Any]) -> bool:
    """Whether the text can leave nothing behind: asserts and assignments of calls, operators and literals."""
    modules = {name for name, value in names.items() if isinstance(value, type(sys))}
    for node in walk(tree):
        if not isinstance(node, PLAIN_NODES):
            return False
        if isinstance(node, _ast.Name) and node.id not in SAFE_BUILTINS and hasattr(builtins, node.id):
            return False
        if isinstance(node, _ast.Name) and node.id in modules and node.id != "math":
            return False
        if isinstance(node, _ast.Attribute) and (node.attr[0] == "_" or isinstance(node.ctx, _ast.Store)):
            return False
    return True


def apply_after_each_statement(tree: _ast.Module) -> None:
    """Puts a call of `__apply__` after each statement that calls something."""
    for node in list(walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                for i in range(len(statements) - 1, -1, -1):
                    last = statements[i]
                    if not isinstance(
                        last, _ast.Return | _ast.FunctionDef | _ast.ClassDef | _ast.Raise
                    ) and any(isinstance(part, _ast.Call) for part in walk(last)):
                        where = {
                            "lineno": last.lineno,
                            "col_offset": 0,
                            "end_lineno": last.lineno,
                            "end_col_offset": 0,
                        }
                        name = _ast.Name("__apply__", _ast.Load(), **where)
                        statements.insert(i + 1, _ast.Expr(_ast.Call(name, [], [], **where), **where))


def judge_tests(control: _socket.socket, job: Any, link: _socket.socket, may_fork: bool) -> None:
    """Runs the tests of a job in order. Each report is the nonce, the test's index and an outcome."""
    nonce, first, tests = job

    def report(index: int, outcome: str) -> None:
        control.send(f"{nonce} {first + index} {outcome}".encode())

    held: list[_socket.socket] = []  # of the test before: as it closes, a process awakes
    for index, text in enumerate(tests):
        mine, theirs = _socket.socketpair()
        try:
            send_fds(link, b"t", [theirs.fileno()])
        except OSError:
            report(index, GONE)
            return
        theirs.close()
        test = Test(mine.fileno())
        try:
            tree: Any = compile(text, "<test>", "exec", 0x400, True)  # the tree alone
            names, problem = test.namespace(tree)
        except Torn:
            report(index, GONE)
            return
        except BaseException as error:  # of a test that is no Python, or of a strange reply
            report(index, f"error:{type(error).__name__}")
            continue
        held[:] = [mine]  # the process of the test before has been killed
        if index == 0:
            report(index, "loaded")
        if problem is not None:
            report(index, "program_error" if problem[0] != "MemoryError" else "memory")
        elif not may_fork or is_plain(tree, names):
            report(index, run_test(test, tree, names))
            if not may_fork and not is_plain(tree, names):
                return
        else:
            child = posix.fork()
            if child == 0:
                report(index, run_test(test, tree, names))
                posix._exit(0)
            if posix.waitpid(child, 0)[1]:
                report(index, "crashed")


def run_test(test: Test, tree: _ast.Module, names: dict[str, Any]) -> str:
    """The outcome of one test's text."""
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
        apply_after_each_statement(tree)
        exec(compile(tree, "<test>", "exec", 0, True), names)
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
