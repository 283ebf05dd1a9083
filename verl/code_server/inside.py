"""A test that runs in the program's process, because it needs more than plain data.

The program could do anything to such a test if it knew how, for they share a process. It is made hard:
what the test's own text calls (builtins, functions of modules) is taken from before the program ran, and a
verdict that the program's own objects have made by operators of their own counts only where the test itself
names their class. Everything else is "opaque_value": neither a pass nor a failure.

No part of this module calls a builtin that a program can reach: each module of ours has builtins of its own.
"""

from __future__ import annotations

import _operator
import sys
from _random import Random
from collections.abc import Callable
from typing import Any

from verl.code_server.wire import MAX_BYTES, OPERATORS, NotPlain, classes_of, encode

DECIDING = OPERATORS - {*["__iter__", "__len__", "__bool__", "__getattr__", "__getattribute__"]}

TRUSTED = [
    "_decimal",
    "_pydecimal",
    "abc",
    "array",
    "builtins",
    "collections",
    "_collections",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "math",
    "numpy",
    "operator",
    "re",
    "string",
    "types",
    "typing",
    "uuid",
    "ipaddress",
    "pathlib",
    "statistics",
    "random",
    "io",
    "_io",
]
ATOMS = {int, float, str, bool, bytes, complex, type(None), bytearray, range, slice, type, type(...)}
CONTAINERS = {list, tuple, set, frozenset}
FAR = 10**12
HEAP_TYPE = 1 << 9
NUM_DECOYS = 12


def contents_of_modules(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each trusted module that has been imported holds, but for the known ones."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in TRUSTED}
    return {name: dict(vars(module)) for name, module in modules.items() if name not in known}


CONTENTS: dict[str, dict[str, Any]] = {}  # what modules hold in a process that never runs a program


class Library:
    """What modules hold before the program runs.

    Args:
        names: The modules that the test imports, which are imported here.
        attributes: The attributes in the test's text, which a program may not have changed in these modules
            and in their classes.
    """

    def __init__(self, names: list[str], attributes: list[str]) -> None:
        self.names = names
        self.attributes = attributes
        for name in names:
            try:
                __import__(name)
            except Exception:  # the test will meet it
                continue
        self.contents = contents_of_modules(CONTENTS) | CONTENTS if names else CONTENTS
        self.builtins = self.contents["builtins"]
        self.before = self.contents_of_names()

    def contents_of_names(self) -> list[Any]:
        contents: list[Any] = []
        for name in self.names:
            module = sys.modules.get(name)
            contents.append(module)
            names = vars(module) if module is not None else {}
            contents += [names.get(attribute) for attribute in self.attributes]
            for kind in [item for item in names.values() if isinstance(item, type)]:
                contents += [getattr(kind, attribute, None) for attribute in self.attributes]
        return contents

    def has_changed(self) -> bool:
        now = self.contents_of_names()
        return len(now) != len(self.before) or any(map(_operator.is_not, now, self.before))


class InsideTest:
    """One test in the program's process.

    Args:
        namespace: The program's names.
        library: What modules held before the program ran.
        names: The names in the test, among them those of classes that it knows.
        value: The number of the chain whose value may not be plain, or 0.
    """

    def __init__(self, namespace: dict[str, Any], library: Library, names: list[str], value: int) -> None:
        self.namespace = namespace
        self.library = library
        self.names = names
        self.value = value
        self.num_chains = 0
        self.is_opaque = self.has_failed = False

    def run(self, code: Any) -> str:
        """Run the test and return its outcome."""
        self.is_opaque = self.library.has_changed()
        names: dict[str, Any] = {f"{name} ": value for name, value in self.library.builtins.items()}
        names |= {"note ": self.note, "compare ": self.compare, "operate ": self.operate}
        names |= {"call ": self.call, "subject ": self.subject, "held ": self.held}
        self.namespace.update(names)
        try:
            exec(code, self.namespace)
        except AssertionError:
            return "failed"
        except MemoryError:
            return "memory"
        except BaseException as error:  # any way of not reaching the end is a failure
            return f"error:{type(error).__name__}"
        if self.has_failed:
            return "failed"
        is_opaque = self.is_opaque or self.value > self.num_chains
        return "opaque_value" if is_opaque else "passed"

    def note(self, value: Any, made_by: Any = None) -> Any:
        """Count a chain, and return its value.

        Args:
            value: The value.
            made_by: The class that was called for it, if one was.
        """
        self.num_chains += 1
        if self.num_chains == self.value:
            try:
                is_plain = len(encode(value)) <= MAX_BYTES
            except (NotPlain, RecursionError):
                is_plain = False
            self.is_opaque |= is_plain
        if isinstance(made_by, type) and made_by not in classes_of(type(value)):
            self.is_opaque = True
        return value

    def held(self, value: Any) -> Any:
        """Return the condition of an assert whose failure the program may try to hide."""
        self.has_failed |= not value
        return value

    def subject(self, value: Any) -> Any:
        """Return the value that a `match` is about to compare."""
        self.is_opaque |= not all(self.is_known(kind) for kind in self.deciders(value))
        return value

    # ------------------------------------------------------------------------------ who decides
    def is_trusted(self, kind: type) -> bool:
        """Return whether a class is Python's or a package's own."""
        if not type.__dict__["__flags__"].__get__(kind) & HEAP_TYPE:
            return True
        module = type.__dict__["__dict__"].__get__(kind).get("__module__")
        if type(module) is not str or module.partition(".")[0] not in TRUSTED:
            return False
        return self.library.contents.get(module, {}).get(type.__dict__["__name__"].__get__(kind)) is kind

    def is_known(self, kind: type) -> bool:
        """Return whether the test itself names a class, or one that it inherits from."""
        named = [self.namespace.get(name) for name in self.names if name.lstrip("_")[:1].isupper()]
        return any(base is name for base in classes_of(kind) for name in named)

    def deciders(self, value: Any, depth: int = 0) -> set[type]:
        """Return the classes of a program in a value that define operators of their own."""
        kind = type(value)
        if kind in ATOMS:
            return set()
        if kind in CONTAINERS or kind is dict:
            if depth > 50:
                return set()
            items = [*value, *value.values()] if kind is dict else [*value]
            if set(map(type, items)) <= ATOMS:
                return set()
            return {decider for item in items for decider in self.deciders(item, depth + 1)}
        if self.is_trusted(kind):
            is_array = type.__dict__["__name__"].__get__(kind) in ("ndarray", "void")
            return {object} if is_array and value.dtype.hasobject else set()
        for base in classes_of(kind):
            if not self.is_trusted(base) and DECIDING & type.__dict__["__dict__"].__get__(base).keys():
                return {kind}
        return set()

    def compare(self, operation: str, left: Any, right: Any) -> Any:
        compute = COMPARISONS[operation]
        result = compute(left, right)
        ours = self.deciders(left)
        theirs = self.deciders(right)
        kinds = ours | theirs
        if not kinds or operation in ("is", "is not") or type(left) is type(right) and ours == theirs:
            return result
        if not all(self.is_known(kind) for kind in kinds):
            self.is_opaque = True
        elif not (ours and theirs):  # its own word against the test's plain value
            self.is_opaque |= not self.tells_apart(compute, operation, left, right, bool(ours), result)
        return result

    def tells_apart(
        self,
        compute: Callable[[Any, Any], Any],
        operation: str,
        left: Any,
        right: Any,
        is_left: bool,
        result: Any,
    ) -> bool:
        """Return whether an object tells the test's value from others, among which it stands at random.

        Args:
            compute: The comparison.
            operation: Its name.
            left: The left operand.
            right: The right operand.
            is_left: Whether the left operand is the object.
            result: What the object said of the test's value.
        """
        random = Random()
        plain = right if is_left else left
        values = other_values(plain, operation, random)
        where = int(random.random() * (len(values) + 1))
        says: list[bool] = []
        for value in [*values[:where], plain, *values[where:]]:
            try:
                says.append(bool(compute(left, value) if is_left else compute(value, right)))
            except Exception:  # a method may refuse a value
                says.append(operation in ("ne", "not in"))
        if operation in ("eq", "ne"):
            return says.count(bool(result)) == 1 or not values
        return len({*says}) == 2 or not values

    def operate(self, operation: str, left: Any, right: Any) -> Any:
        ours = self.deciders(left)
        theirs = self.deciders(right)
        if ours != theirs and not all(self.is_known(kind) for kind in ours | theirs):
            self.is_opaque = True
        return getattr(_operator, operation)(left, right)

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what is no chain of the program, such as a function of a module that compares."""
        if (
            type(function) in LIBRARY_FUNCTIONS
            or getattr(function, "__module__", "").partition(".")[0] == "numpy"
        ):
            kinds = self.deciders([*args, *kwargs.values()])
            if kinds and not all(self.is_known(kind) for kind in kinds):
                self.is_opaque = True
        elif getattr(function, "__globals__", self.namespace) is not self.namespace:
            kinds = self.deciders([*args, *kwargs.values()])
            if len(args) > 1 and kinds and not all(self.is_known(kind) for kind in kinds):
                self.is_opaque = True
        return function(*args, **kwargs)


LIBRARY_FUNCTIONS = {type(len), type([].append), type("".join), type(str.join), type((1).__eq__)}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(_operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
    "is": lambda left, right: left is right,
    "is not": lambda left, right: left is not right,
}


def other_values(plain: Any, operation: str, random: Any) -> list[Any]:
    """Return values like a plain one that are none, or none if there are no such values."""
    kind = type(plain)
    steps = [int(random.random() * FAR) + 7 for _ in range(NUM_DECOYS)]
    if operation not in ("eq", "ne", "in", "not in"):
        return [plain - FAR, plain + FAR] if kind in (int, float) else []
    if kind in (int, float):
        return [plain + step for step in steps]
    if kind is str:
        return [plain + str(step) for step in steps]
    if kind in (list, tuple):
        return [other_items(plain, step) for step in steps]
    return []


def other_items(plain: Any, step: int) -> Any:
    items = [item + step if type(item) in (int, float) else item for item in plain]
    return type(plain)(items if items != [*plain] else [*items, step])
