"""What the schema is made of: a key, a block of keys, and the questions that can be asked of them.

    @dataclass(slots=True)
    class Optim(Block):
        lr: float = key(1e-6, "peak learning rate", ge=0)

That line is the only place where the key's default, type, range and meaning stand. The readable yaml,
`--help`, the JSON schema and the checks at the start are made from it.
"""

from __future__ import annotations

import copy
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list [a,b]",
    dict: "a dictionary {key: value}",
}


@dataclass(frozen=True)
class Key:
    """What the schema says of one key.

    Attributes:
        path: dotted name, e.g. "trainer.seed". default: its value when nothing sets it.
        types: that a value may have; `nullable`: null is a value too.
        meaning: what it does, with the unit. choices: the values that there are (empty: any).
        importable: besides the choices, a function of the user's own as package.module:function.
        low, high: smallest and largest number; `above`: greater than `low`, `below`: less than `high`.
        follows: the key whose value is the default. must_follow: the reason why it can have no other value;
            it is then no key that a user sets, but a name under which the program reads that value.
        is_path: names a file or a folder; "~" is expanded.
        is_open: a dictionary in which the user may set any key.
    """

    path: str
    default: Any
    types: tuple[type, ...]
    nullable: bool
    meaning: str = ""
    choices: tuple[Any, ...] = ()
    importable: bool = False
    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    follows: str | None = None
    must_follow: str | None = None
    is_path: bool = False
    is_open: bool = False

    @property
    def expected(self) -> str:
        """The values that it may have, in words."""
        if self.choices:
            names = ", ".join("null" if choice is None else str(choice) for choice in self.choices)
            return f"one of: {names}" + (
                ", or your own as package.module:function" if self.importable else ""
            )
        words = " or ".join(_TYPE_NAMES[kind] for kind in self.types)
        if self.low is not None and self.high is not None:
            low = f"above {self.low:g} and " if self.above else f"from {self.low:g} to "
            words += f" {low}{'below' if self.below else ''} {self.high:g}".replace("  ", " ")
        elif self.low is not None:
            words += f" {'above' if self.above else 'of at least'} {self.low:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any) -> None:
        """Raises ValueError if the value is of another type, out of range, or not among the choices."""
        if value is None and self.nullable:
            return
        fits = isinstance(value, self.types) or (float in self.types and isinstance(value, int))
        if isinstance(value, bool) and bool not in self.types:
            fits = False
        if fits and self.choices:
            is_own = self.importable and ":" in value
            if is_own:
                _check_importable(self.path, value)
            fits = is_own or value in self.choices
        if fits and isinstance(value, int | float) and not isinstance(value, bool):
            too_low = self.low is not None and (value <= self.low if self.above else value < self.low)
            too_high = self.high is not None and (value >= self.high if self.below else value > self.high)
            fits = not (too_low or too_high)
        if not fits:
            raise ValueError(f"Found {self.path}={shown(value)}; expected {self.expected}.")


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[Any] = (),
    importable: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    follows: str | None = None,
    is_path: bool = False,
) -> Any:
    """A field of a block that users may set; see `Key`. ge, gt, le, lt: bounds, as in "greater or equal"."""
    metadata = {
        "meaning": meaning,
        "choices": tuple(choices),
        "importable": importable,
        "low": gt if ge is None else ge,
        "high": lt if le is None else le,
        "above": gt is not None,
        "below": lt is not None,
        "follows": follows,
        "is_path": is_path,
    }
    return _field(default, metadata)


def same_as(block: type[Block], name: str, default: Any) -> Any:
    """The key `name` of another block with another default."""
    (declared,) = (each for each in fields(block) if each.name == name)
    return _field(default, dict(declared.metadata))


def must_follow(path: str, reason: str) -> Any:
    """A field that always has the value of the key `path`; a user may set it to that value and no other."""
    return field(default=None, metadata={"follows": path, "must_follow": reason})


def group(block: type[Block]) -> Any:
    """A field that holds a block of keys."""
    return field(default_factory=block)


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(slots=True)
class Block(Mapping[str, Any]):
    """Keys that stand together. The run reads them as attributes; others than those declared can't be set."""

    def __getitem__(self, name: str) -> Any:
        """For names that are put together from pieces; `block.name` otherwise."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(
            [name for name in dir(type(self)) if not (name.startswith("_") or hasattr(Mapping, name))]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def keys_of(block: type[Block], prefix: str = "") -> Mapping[str, Key]:
    """Dotted name -> what the schema says, in the order of the declarations, of a block and those in it."""
    hints = typing.get_type_hints(block)
    found: dict[str, Key] = {}
    for each in fields(block):
        path, hint = prefix + each.name, hints[each.name]
        if isinstance(hint, type) and issubclass(hint, Block):
            found |= keys_of(hint, path + ".")
            continue
        if not each.metadata:  # the program's own
            continue
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = tuple(typing.get_origin(kind) or kind for kind in kinds if kind is not type(None))
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        nullable = (
            type(None) in kinds or default is None
        )  # a key that the user has to set is typed without it
        found[path] = Key(path, default, plain, nullable, is_open=plain == (dict,), **each.metadata)
    return found


def settable(block: type[Block]) -> dict[str, Key]:
    """Those of `keys_of` that a user may set."""
    return {path: each for path, each in keys_of(block).items() if each.must_follow is None}


def at(config: Block, path: str) -> Any:
    """The value of a key, or the block, with this dotted name."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def put(config: Block, path: str, value: Any) -> None:
    """Sets the key with this dotted name."""
    owner, _, name = path.rpartition(".")
    setattr(at(config, owner) if owner else config, name, value)


def flat(config: Block) -> dict[str, Any]:
    """Dotted name -> value of every key, also of those that must follow another."""
    return {path: at(config, path) for path in keys_of(type(config))}


def to_dict(config: Block) -> dict[str, Any]:
    """Nested dictionaries with every key that a user may set: what config.yaml and the loggers get."""
    nested: dict[str, Any] = {}
    for path in settable(type(config)):
        *groups, name = path.split(".")
        inner = nested
        for each in groups:
            inner = inner.setdefault(each, {})
        inner[name] = copy.deepcopy(at(config, path))
    return nested


def as_mappings(block: Block) -> dict[str, Any]:
    """Nested dictionaries with all that can be read of a block, constants too."""
    return {
        name: as_mappings(value) if isinstance(value, Block) else copy.deepcopy(value)
        for name, value in block.items()
    }


def check_values(config: Block) -> None:
    """Types, ranges and choices of all keys. Raises ValueError for the first one that is wrong."""
    for path, each in keys_of(type(config)).items():
        value = at(config, path)
        if each.must_follow is None:
            each.check(value)
        elif value != at(config, str(each.follows)):
            expected = shown(at(config, str(each.follows)))
            raise ValueError(
                f"Found {path}={shown(value)}; expected {expected}, as {each.follows} is. {each.must_follow}"
            )


def shown(value: Any) -> str:
    """A value as a command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    return "[" + ",".join(map(shown, value)) + "]" if isinstance(value, list) else str(value)


def as_list(value: Any) -> list[Any]:
    """One value or a list of them, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def expand_home(value: Any) -> Any:
    """ "~" at the start of a path, or of each in a list, replaced by the home folder."""
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~") else value
    return [expand_home(item) for item in value] if isinstance(value, list) else value


def blocks_of(block: type[Block], prefix: str = "") -> Iterator[str]:
    """Dotted names of the groups of keys in a block."""
    for path in keys_of(block, prefix):
        for end, letter in enumerate(path):
            if letter == ".":
                yield path[:end]


def _check_importable(path: str, function: str) -> None:
    """That there is such a module; the function is looked for when it is first used."""
    module, _, name = function.partition(":")
    try:
        is_there = name.isidentifier() and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise ValueError(
            f"Found {path}={function}; expected package.module:function of a module that can be imported "
            "from where the run is started."
        )
