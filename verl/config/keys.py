"""What the schema is made of: a key, a block of keys, and the questions that can be asked of them.

    @dataclass(slots=True)
    class Optim(Block):
        lr: NotNegative = key(1e-6, "peak learning rate")

That line is the only place where the key's default, type, range and meaning stand. The readable yaml,
`--help`, the JSON schema and the checks at the start are made from it.
"""

from __future__ import annotations

import copy
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Bounds of a number. above: greater than `low`."""

    low: float
    high: float | None = None
    above: bool = False


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
OrMinusOne = Annotated[int, Range(-1)]
Share = Annotated[float, Range(0, 1)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
FilePath = Annotated[str, "path"]  # of a file or a folder; "~" is expanded
Files = FilePath | list[str]

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
        bounds: of a number. is_path: names a file or a folder.
        follows: the key whose value is the default. must_follow: the reason why it can have no other value;
            it is then no key that a user sets, but a name under which the program reads that value.
    """

    path: str
    default: Any
    types: tuple[type, ...]
    nullable: bool
    meaning: str = ""
    choices: tuple[Any, ...] = ()
    importable: bool = False
    bounds: Range | None = None
    is_path: bool = False
    follows: str | None = None
    must_follow: str | None = None

    @property
    def is_open(self) -> bool:
        """A dictionary in which the user may set any key."""
        return self.types == (dict,)

    @property
    def expected(self) -> str:
        """The values that it may have, in words."""
        if self.choices:
            own = ", or your own as package.module:function" if self.importable else ""
            return f"one of: {', '.join(map(shown, self.choices))}{own}"
        words = " or ".join(_TYPE_NAMES[kind] for kind in self.types)
        if self.bounds is not None:
            low = self.bounds.low
            high = self.bounds.high
            words += f" {'above' if self.bounds.above else 'of at least'} {low:g}"
            words += "" if high is None else f" and at most {high:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any) -> None:
        """Raises ValueError if the value is of another type, out of range, or not among the choices."""
        if value is None and self.nullable:
            return
        fits = isinstance(value, self.types) or (float in self.types and isinstance(value, int))
        if isinstance(value, bool) and bool not in self.types:
            fits = False
        if fits and self.importable and ":" in value:
            _check_importable(self.path, value)
        elif fits and self.choices:
            fits = value in self.choices
        if fits and self.bounds is not None:
            low = self.bounds.low
            high = self.bounds.high
            fits = (value > low if self.bounds.above else value >= low) and (high is None or value <= high)
        if not fits:
            raise ValueError(f"Found {self.path}={shown(value)}; expected {self.expected}.")


def key(
    default: Any, meaning: str, choices: str = "", *, importable: bool = False, follows: str | None = None
) -> Any:
    """A field of a block that users may set; see `Key`. choices: names, with spaces between them."""
    values = tuple(None if name == "null" else name for name in choices.split())
    if choices:
        meaning = f"{choices.replace(' ', ' | ')} ({meaning})"
    metadata = {"meaning": meaning, "choices": values, "importable": importable, "follows": follows}
    return _field(default, metadata)


def same_as(block: type[Block], name: str, default: Any) -> Any:
    """The key `name` of another block with another default."""
    (declared,) = (each for each in fields(block) if each.name == name)
    return _field(default, dict(declared.metadata))


def must_follow(path: str, reason: str) -> Any:
    """A field that always has the value of the key `path`; a user may set it to that value and no other."""
    return field(default=None, metadata={"follows": path, "must_follow": reason})


def follows_actor(path: str) -> Any:
    """A field of another model that must be as the actor's."""
    return must_follow(f"actor_rollout_ref.{path}", _ALIKE)


_ALIKE = "Models that share processes are kept alike; set the actor's."


def group(block: type[Block], follows_actor: str = "", but: str = "") -> Any:
    """A field that holds a block of keys.

    follows_actor: block of the actor whose values these keys must have, `but` for those named here, with
        spaces between them.
    """
    metadata = {"follows": f"actor_rollout_ref.{follows_actor}", "but": but.split()} if follows_actor else {}
    return field(default_factory=block, metadata=metadata)


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
        return iter(each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@cache
def keys_of(block: type[Block], prefix: str = "") -> Mapping[str, Key]:
    """Dotted name -> what the schema says, in the order of the declarations, of a block and those in it."""
    hints = typing.get_type_hints(block, include_extras=True)
    keys: dict[str, Key] = {}
    for each in fields(block):
        path = prefix + each.name
        hint = hints[each.name]
        if isinstance(hint, type) and issubclass(hint, Block):
            for inner_path, inner in keys_of(hint, path + ".").items():
                name = inner_path.removeprefix(path + ".")
                if each.metadata and name.split(".")[0] not in each.metadata["but"] and not inner.must_follow:
                    follows = f"{each.metadata['follows']}.{name}"
                    inner = replace(inner, follows=follows, must_follow=_ALIKE)
                keys[inner_path] = inner
            continue
        if not each.metadata:  # the program's own
            continue
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = list(typing.get_args(hint) if is_union else (hint,))
        limits: list[Any] = []
        for number, kind in enumerate(kinds):
            if typing.get_origin(kind) is Annotated:
                kinds[number], *limits = typing.get_args(kind)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        keys[path] = Key(
            path,
            default,
            tuple(typing.get_origin(kind) or kind for kind in kinds if kind is not type(None)),
            type(None) in kinds or default is None,  # a key that the user has to set is typed without it
            bounds=next((limit for limit in limits if isinstance(limit, Range)), None),
            is_path="path" in limits,
            **each.metadata,
        )
    return keys


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


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> value as dictionaries within dictionaries."""
    top: dict[str, Any] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        inner = top
        for each in groups:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return top


def to_dict(config: Block) -> dict[str, Any]:
    """Nested dictionaries with every key that a user may set: what config.yaml and the loggers get."""
    return copy.deepcopy(nested({path: at(config, path) for path in settable(type(config))}))


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


def refusal(config: Block, keys: str, expected: str) -> ValueError:
    """The error for keys (dotted names, with spaces between them) whose values don't go together: "Found
    a=1 with b=2, <expected>".
    """
    values = [f"{path}={shown(at(config, path))}" for path in keys.split()]
    return ValueError(f"Found {values[0]}{' with ' * (len(values) > 1)}{' and '.join(values[1:])}{expected}")


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
