"""The parts of the schema: a key, a block of keys, and the questions that can be asked of them.

    @config_block
    class Optim(Block):
        lr: NotNegative = key(1e-6, "peak learning rate")

That line is the only place where the key's default, type, range and meaning are written. The primary files
that Hydra reads, `--help`, the JSON schema and the checks at the start are made from it.

Blocks are frozen: `replace_values` derives a configuration with other values.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform


@dataclass(frozen=True)
class Range:
    """The bounds of a number; with `above`, the number must be greater than `low`."""

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
FilePath = Annotated[str, "path"]  # the path of a file or a folder; "~" is expanded
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
        path: dotted name, e.g. "trainer.seed".
        default: its value when nothing sets it.
        types: types that a value may have.
        nullable: whether null is a value too.
        meaning: what the key does, with the unit.
        choices: the possible values (empty: any).
        gone: values that earlier versions had, with what to do instead.
        importable: whether a function of the user's own, as package.module:function, is possible besides the
            choices.
        bounds: bounds of a number.
        is_path: whether the value names a file or a folder.
        follows: the key whose value is the default.
        must_follow: the reason why the key can have no other value. The key is then not one that a user sets,
            but a name under which the program reads the value of the other key.
    """

    path: str
    default: Any
    types: tuple[type, ...]
    nullable: bool
    meaning: str = ""
    choices: tuple[Any, ...] = ()
    gone: Mapping[str, str] | None = None
    importable: bool = False
    bounds: Range | None = None
    is_path: bool = False
    follows: str | None = None
    must_follow: str | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the key is a dictionary in which the user may set any key."""
        return self.types == (dict,)

    @property
    def expected(self) -> str:
        """Return the values that the key may have, in words."""
        if self.choices:
            custom = ", or your own as package.module:function" if self.importable else ""
            return f"one of: {', '.join(map(format_value, self.choices))}{custom}"
        words = " or ".join(_TYPE_NAMES[kind] for kind in self.types)
        if self.bounds is not None:
            low = self.bounds.low
            high = self.bounds.high
            words += f" {'above' if self.bounds.above else 'of at least'} {low:g}"
            words += "" if high is None else f" and at most {high:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any) -> None:
        """Raise ValueError if the value is of another type, out of range, or not among the choices."""
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
            remedy = (self.gone or {}).get(str(value))
            hint = "" if remedy is None else f" {remedy}"
            raise ValueError(f"Found {self.path}={format_value(value)}; expected {self.expected}.{hint}")


def key(
    default: Any,
    meaning: str,
    choices: str = "",
    *,
    gone: Mapping[str, str] | None = None,
    importable: bool = False,
    follows: str | None = None,
) -> Any:
    """Declare a field of a block that users may set; see `Key`.

    `choices` are names, with spaces between them.
    """
    values = tuple(None if name == "null" else name for name in choices.split())
    if choices:
        meaning = f"{choices.replace(' ', ' | ')} ({meaning})"
    metadata: dict[str, Any] = {
        "meaning": meaning,
        "choices": values,
        "importable": importable,
        "follows": follows,
    }
    metadata["gone"] = gone
    return _field(default, metadata)


def key_like(block: type[Block], name: str, default: Any) -> Any:
    """Declare the key `name` of another block with another default."""
    (declared,) = (block_field for block_field in fields(block) if block_field.name == name)
    return _field(default, dict(declared.metadata))


def must_follow(path: str, reason: str) -> Any:
    """Declare a field that always has the value of the key `path`; a user may set it only to that value."""
    return field(default=None, metadata={"follows": path, "must_follow": reason})


def follows_actor(path: str) -> Any:
    """Declare a field of another model that must be the same as the actor's."""
    return must_follow(f"actor_rollout_ref.{path}", _ALIKE)


_ALIKE = "Models that share processes are kept alike; set the actor's."


def group(block: type[Block], follows_actor: str = "", but: str = "") -> Any:
    """Declare a field that holds a block of keys.

    Args:
        block: the block.
        follows_actor: block of the actor whose values these keys must have.
        but: keys that need not have them, with spaces between their names.
    """
    metadata = {"follows": f"actor_rollout_ref.{follows_actor}", "but": but.split()} if follows_actor else {}
    return field(default_factory=block, metadata=metadata)


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


Class = TypeVar("Class", bound=type)


def _refuse_assignment(block: Block, name: str, value: object = None) -> NoReturn:
    raise AttributeError(
        f"Found an assignment to {name!r} of {type(block).__name__}, but a configuration is frozen; derive "
        'another one: config = verl.config.replace_values(config, {"trainer.seed": 3}).'
    )


@dataclass_transform(frozen_default=True)
def config_block(block: Class) -> Class:
    """Make a class a frozen dataclass whose attributes say how to derive another one when they are set."""
    frozen: Any = dataclass(slots=True, frozen=True)(block)
    frozen.__setattr__ = _refuse_assignment
    frozen.__delattr__ = _refuse_assignment
    return frozen


@config_block
class Block(Mapping[str, Any]):
    """A group of keys. The run reads them as attributes."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of a key whose name is put together from pieces; otherwise use `block.name`."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(block_field.name for block_field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@cache
def keys_of(block: type[Block], prefix: str = "") -> Mapping[str, Key]:
    """Return what the schema says of the keys of a block and of the blocks in it.

    The keys are dotted names, in the order of the declarations.
    """
    hints = typing.get_type_hints(block, include_extras=True)
    keys: dict[str, Key] = {}
    for entry in fields(block):
        path = prefix + entry.name
        hint = hints[entry.name]
        if isinstance(hint, type) and issubclass(hint, Block):
            for inner_path, inner in keys_of(hint, path + ".").items():
                name = inner_path.removeprefix(path + ".")
                if (
                    entry.metadata
                    and name.split(".")[0] not in entry.metadata["but"]
                    and not inner.must_follow
                ):
                    follows = f"{entry.metadata['follows']}.{name}"
                    inner = replace(inner, follows=follows, must_follow=_ALIKE)
                keys[inner_path] = inner
            continue
        if not entry.metadata:  # a field of the program, which is no key
            continue
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = list(typing.get_args(hint) if is_union else (hint,))
        limits: list[Any] = []
        for number, kind in enumerate(kinds):
            if typing.get_origin(kind) is Annotated:
                kinds[number], *limits = typing.get_args(kind)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        keys[path] = Key(
            path,
            default,
            tuple(typing.get_origin(kind) or kind for kind in kinds if kind is not type(None)),
            type(None) in kinds or default is None,  # the type of a key that the user must set lacks None
            bounds=next((limit for limit in limits if isinstance(limit, Range)), None),
            is_path="path" in limits,
            **entry.metadata,
        )
    return keys


def settable(block: type[Block]) -> dict[str, Key]:
    """Return those of `keys_of` that a user may set."""
    return {path: spec for path, spec in keys_of(block).items() if spec.must_follow is None}


def get_value(config: Block, path: str) -> Any:
    """Return the value of a key, or the block, with this dotted name."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


Config = TypeVar("Config", bound=Block)


def replace_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration, or a block, with other values; the one that is given stays as it is.

    Args:
        config: the configuration, or a block of it.
        values: values by dotted names, for example {"trainer.seed": 3}. Keys that must follow one of these
            take its value too.
    """
    followers = {
        path: values[str(spec.follows)]
        for path, spec in keys_of(type(config)).items()
        if spec.must_follow is not None and spec.follows in values
    }
    changes: dict[str, Any] = {}
    inner_values: dict[str, dict[str, Any]] = {}
    for path, value in {**followers, **values}.items():
        name, _, rest = path.partition(".")
        if rest:
            inner_values.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    for name, inner in inner_values.items():
        changes[name] = replace_values(getattr(config, name), inner)
    return dataclasses.replace(config, **changes)


def build(block: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    """Return a block whose keys have the values of these dotted names, which begin with `prefix`."""
    arguments: dict[str, Any] = {}
    for name, inner in _fields_of(block).items():
        path = prefix + name
        arguments[name] = values[path] if inner is None else build(inner, values, path + ".")
    return block(**arguments)


@cache
def _fields_of(block: type[Block]) -> dict[str, type[Block] | None]:
    """Return the keys of a block, and the blocks in it with their classes."""
    hints = typing.get_type_hints(block)
    inner: dict[str, type[Block] | None] = {}
    for entry in fields(block):
        hint = hints[entry.name]
        if isinstance(hint, type) and issubclass(hint, Block):
            inner[entry.name] = hint
        elif entry.metadata:
            inner[entry.name] = None
    return inner


def flatten(config: Block) -> dict[str, Any]:
    """Return the value of every key by its dotted name, also of those that must follow another."""
    return {path: get_value(config, path) for path in keys_of(type(config))}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by dotted names into dictionaries within dictionaries."""
    top: dict[str, Any] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        inner = top
        for group_name in groups:
            inner = inner.setdefault(group_name, {})
        inner[name] = value
    return top


def to_dict(config: Block) -> dict[str, Any]:
    """Return nested dictionaries with every key that a user may set: what config.yaml and the loggers get."""
    return copy.deepcopy(nested({path: get_value(config, path) for path in settable(type(config))}))


def check_values(config: Block) -> None:
    """Check types, ranges and choices of all keys. Raise ValueError for the first one that is wrong."""
    for path, spec in keys_of(type(config)).items():
        value = get_value(config, path)
        if spec.must_follow is None:
            spec.check(value)
        elif value != get_value(config, str(spec.follows)):
            expected = format_value(get_value(config, str(spec.follows)))
            raise ValueError(
                f"Found {path}={format_value(value)}; expected {expected}, as {spec.follows} is. "
                f"{spec.must_follow}"
            )


def config_error(config: Block, keys: str, explanation: str) -> ValueError:
    """Return the error for values that are wrong or don't go together: "Found a=1 with b=2<explanation>".

    `keys` are dotted names, with spaces between them.
    """
    values = [f"{path}={format_value(get_value(config, path))}" for path in keys.split()]
    return ValueError(
        f"Found {values[0]}{' with ' * (len(values) > 1)}{' and '.join(values[1:])}{explanation}"
    )


def format_value(value: Any) -> str:
    """Return a value as a command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    return "[" + ",".join(map(format_value, value)) + "]" if isinstance(value, list) else str(value)


def as_list(value: Any) -> list[Any]:
    """Return one value or a list of them as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def expand_home(value: Any) -> Any:
    """Replace "~" at the start of a path, or of each path in a list, by the home folder."""
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~") else value
    return [expand_home(item) for item in value] if isinstance(value, list) else value


def _check_importable(path: str, function: str) -> None:
    """Check that there is such a module; the function is looked up when it is first used."""
    module, _, name = function.partition(":")
    try:
        exists = name.isidentifier() and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise ValueError(
            f"Found {path}={function}; expected package.module:function of a module that can be imported "
            "from where the run is started."
        )
