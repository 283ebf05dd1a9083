"""From what a user wrote to one configuration: defaults < environment < files < key=value.

    ["@a.yaml", "trainer.seed=1", "+trainer.val_only=true", ...] -> settings -> checked -> Config

A misspelt key names its nearest neighbour; `+key` and `++key` mean `key` (Search-R1's scripts need that), and
of a repeated key the last one counts.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
import yaml

from verl.config.compatibility import PASSES, RL, SFT, Table, replicas
from verl.config.keys import Block, Key, at, blocks_of, check_values, expand_home, keys_of, put, shown
from verl.config.schema import Config
from verl.config.sft import SFTConfig
from verl.config.values import UnreadableValue, parse_value, read_number

VARIABLE_PREFIX = "VERL__"


@dataclass(frozen=True)
class Setting:
    """A key's value in one layer. text: as the user wrote it, for messages. layer: 1 environment, 2 and so on
    files, the last one the command line. origin: the same in words.
    """

    key: str
    value: Any
    text: str
    layer: int
    origin: str


@dataclass(frozen=True)
class Loaded:
    """A configuration, where each of its values is from, and lines on keys that change nothing here."""

    config: Any
    origins: Mapping[str, str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Program:
    """A configuration with a name. preset: dotted name -> default instead of the schema's."""

    schema: type[Block]
    table: Table
    preset: Mapping[str, Any] = field(default_factory=dict)


PROGRAMS = {
    "ppo_trainer": Program(Config, RL),
    "ppo_megatron_trainer": Program(Config, RL, {"actor_rollout_ref.actor.strategy": "megatron"}),
    "sft_trainer": Program(SFTConfig, SFT),
}


def program_named(name: str) -> Program:
    """Raises ValueError for a name that there is not."""
    if name not in PROGRAMS:
        raise ValueError(f"Found no configuration named {name!r}; expected one of: {', '.join(PROGRAMS)}.")
    return PROGRAMS[name]


def load(
    arguments: Sequence[str],
    config_name: str = "ppo_trainer",
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """The configuration that the layers give.

    Args:
        arguments: `key=value`, `+key=value`, `++key=value`, `@file` or `@ file`.
        config_name: one of PROGRAMS.
        environment: variables; those that start with VERL__ count (default: the process's).

    Returns:
        The configuration, with defaults that follow other keys and `~` in paths filled in. Reading or setting
        an attribute that is not declared raises AttributeError.

    Raises:
        ValueError: a setting can't be read, names an unknown key, or has a value that the key can't have.
    """
    program = program_named(config_name)
    keys, table = keys_of(program.schema), program.table
    values = {path: each.default for path, each in keys.items()} | dict(program.preset)
    origins = dict.fromkeys(keys, "default") | dict.fromkeys(program.preset, config_name)
    aliases: dict[str, Setting] = {}
    layer_of: dict[str, int] = {}
    notes: dict[str, str | None] = {}
    for written in _layers(arguments, os.environ if environment is None else environment, keys, table):
        for setting in _named(written, program):
            if setting.key in table.aliases:
                aliases[setting.key] = setting
            elif setting.key in table.names:
                notes[setting.key] = table.note(setting.key, setting.value)
            else:
                setting = _opened(setting, keys, values)
                values[setting.key], origins[setting.key] = setting.value, setting.origin
                layer_of[setting.key] = setting.layer
    converted: list[Setting] = []
    for name, setting in aliases.items():
        alias = table.aliases[name]
        # a key's own name wins over another one in the same or a lower layer
        if setting.value is None or (layer_of.get(alias.key, 0) >= setting.layer and not alias.joins):
            continue
        alias.check(name, setting.value)
        values.update(alias.also)
        if alias.convert is None:
            values[alias.key] = setting.value
        else:
            converted.append(setting)
        origins[alias.key] = f"{setting.origin} ({name})"
    _resolve(values, keys, origins)
    for path, each in keys.items():
        source = keys[each.follows] if each.must_follow is not None and each.follows else each
        if source.is_path:
            values[path] = expand_home(values[path])
        if each.must_follow is None:
            each.check(values[path])
    config = program.schema()
    for path, value in values.items():
        put(config, path, value)
    for setting in converted:
        alias = table.aliases[setting.key]
        assert alias.convert is not None
        put(config, alias.key, alias.convert(config, setting.value))
    _complete(config)
    check_values(config)
    return Loaded(config, origins, [note for note in notes.values() if note is not None])


def _complete(config: Block) -> None:
    """Fills in, in place, what depends on several keys."""
    if not isinstance(config, Config):
        return
    for name, rows in PASSES.items():  # left null where passes are formed by tokens
        if at(config, f"{name}_per_gpu") is None and not config.actor_rollout_ref.actor.use_dynamic_bsz:
            put(config, f"{name}_per_gpu", max(1, rows // replicas(config)))
    vllm = config.actor_rollout_ref.rollout.vllm
    if vllm.python is not None and "/" in vllm.python:  # workers may have another working directory
        vllm.python = str(Path(vllm.python).absolute())


def _layers(
    arguments: Sequence[str], environment: Mapping[str, str], keys: Mapping[str, Key], table: Table
) -> Iterator[Setting]:
    """All settings, the weakest layer first."""
    names = {name.lower(): name for name in (*keys, *table.names)}
    for variable, text in sorted(environment.items()):
        if variable.startswith(VARIABLE_PREFIX):
            name = variable.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()
            name = names.get(name, name)
            value = _value(text, keys.get(name), f"{variable}={text}")
            yield Setting(name, value, f"{variable}={text}", 1, f"environment ({variable})")
    files, rest = split_files(arguments)
    for number, path in enumerate(files):
        yield from _file_settings(path, 2 + number)
    for argument in rest:
        name, text = _split(argument)
        yield Setting(name, _value(text, keys.get(name), argument), argument, 2 + len(files), "command line")


def split_files(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(files of `@file` and `@ file`, the other arguments)."""
    files, rest, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("@"):
            rest.append(argument)
            continue
        name = argument[1:] or (waiting.pop(0) if waiting else "")
        path = Path(name).expanduser()
        if path.suffix not in (".yaml", ".yml", ".toml"):
            raise ValueError(f"Found @{name}; expected a file that ends in .yaml, .yml or .toml.")
        if not path.is_file():
            raise ValueError(f"Found no file at @{name}; expected a yaml or toml file with keys.")
        files.append(path)
    return files, rest


class _YamlLoader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which yaml 1.1 takes for text."""


_YamlLoader.add_constructor(
    "tag:yaml.org,2002:str",
    lambda loader, node: read_number(node.value) if node.style is None else node.value,
)


def _file_settings(path: Path, layer: int) -> Iterator[Setting]:
    text = path.read_text(encoding="utf-8")
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _YamlLoader)  # noqa: S506
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}; expected keys with values.")
    for name, value in content.items():
        yield Setting(str(name), value, f"{name} in {path}", layer, str(path))


def _split(argument: str) -> tuple[str, str]:
    """(key, value as text) of an argument."""
    if argument.startswith("~"):
        name = argument[1:].partition("=")[0]
        raise ValueError(f"Found {argument!r}; a key cannot be removed. Set {name}=null or leave it out.")
    if argument.startswith("-"):
        raise ValueError(f"Found the option {argument!r}; expected key=value. --help lists the keys.")
    name, equals, text = argument.lstrip("+").partition("=")
    if not equals:
        raise ValueError(f"Found {argument!r}; expected key=value.")
    if re.fullmatch("[A-Z][A-Z0-9_]+", name):
        raise ValueError(
            f"Found the unknown key {name!r} in {argument!r}. An environment variable goes before the "
            f"command: {name}={text} bash <the script> ... --help lists all keys."
        )
    return name.strip(), text


def _value(text: str, declared: Key | None, argument: str) -> Any:
    only_text = declared is not None and declared.types == (str,)
    nullable = declared is None or declared.nullable
    try:
        return parse_value(text, only_text=only_text, nullable=nullable)
    except UnreadableValue as error:
        raise ValueError(f"Found {argument!r}{error}") from None


def _named(setting: Setting, program: Program) -> Iterator[Setting]:
    """The setting, or one for each entry of a dictionary that stands for a group of keys."""
    keys, table, name = keys_of(program.schema), program.table, setting.key
    if name in keys or name in table.names or any(_is_in(name, path) for path in keys if keys[path].is_open):
        yield setting
        return
    groups = {*blocks_of(program.schema), *table.groups}
    if name in groups and isinstance(setting.value, dict):
        for inner, value in setting.value.items():
            one = Setting(f"{name}.{inner}", value, setting.text, setting.layer, setting.origin)
            yield from _named(one, program)
        return
    known = [path for path in keys if keys[path].must_follow is None]
    if name in groups:
        inside = ", ".join(path for path in known if _is_in(path, name))
        raise ValueError(f"Found {setting.text!r}, but {name} is a group of keys; expected one of: {inside}.")
    if name.split(".")[0] == "hydra":
        raise ValueError(
            f"Found {setting.text!r}; the program writes nothing through Hydra, so hydra.* keys are not "
            "taken. The run's folder is trainer.default_local_dir."
        )
    first, *others = nearest_keys(name, known)
    gone = table.removed.get(name)
    raise ValueError(
        f"Found the unknown key {name!r} in {setting.text!r}. "
        + (gone or f"The nearest known key is {first!r} (then {', '.join(others)}).")
        + " --help lists all keys."
    )


def _is_in(name: str, group: str) -> bool:
    return name.startswith(group + ".")


def _opened(setting: Setting, keys: Mapping[str, Key], values: dict[str, Any]) -> Setting:
    """A setting below an open key becomes one of that key; numbers become what the key holds."""
    name, value = setting.key, setting.value
    if name not in keys:
        owner = next(path for path in keys if keys[path].is_open and _is_in(name, path))
        inner = dict(values[owner])
        target = inner
        *groups, last = name.removeprefix(owner + ".").split(".")
        for group in groups:
            target[group] = dict(target.get(group) or {})
            target = target[group]
        target[last] = value
        name, value = owner, inner
    if isinstance(value, int) and not isinstance(value, bool) and keys[name].types == (float,):
        value = float(value)
    return Setting(name, value, setting.text, setting.layer, setting.origin)


def _resolve(values: dict[str, Any], keys: Mapping[str, Key], origins: dict[str, str]) -> None:
    """Fills in, in place, defaults that follow other keys, and `${key}` in texts."""

    def resolved(path: str, waiting: tuple[str, ...] = ()) -> Any:
        if path not in values:
            raise ValueError(
                f"Found ${{{path}}} in {waiting[-1]}={values[waiting[-1]]}; there is no such key."
            )
        if path in waiting:
            raise ValueError(f"Found {path}={values[path]}, which leads back to itself; expected a value.")
        source = keys[path].follows
        if source is not None and origins[path] == "default":
            values[path], origins[path] = resolved(source, (*waiting, path)), f"as {source}"
        value = values[path]
        if isinstance(value, str) and "${" in value:
            whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
            values[path] = (
                resolved(whole[1], (*waiting, path))
                if whole
                else re.sub(r"\$\{([\w.]+)\}", lambda m: shown(resolved(m[1], (*waiting, path))), value)
            )
        return values[path]

    for path in keys:
        resolved(path)


def nearest_keys(name: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known keys that look most like `name`, best first; a missing front part is no difference."""
    depth = name.count(".") + 1

    def likeness(candidate: str) -> tuple[float, float]:
        tail = ".".join(candidate.split(".")[-depth:])
        ratios = [difflib.SequenceMatcher(None, name, text).ratio() for text in (candidate, tail)]
        last = difflib.SequenceMatcher(None, name.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(ratios) + 0.5 * last, ratios[0]

    return sorted(known, key=likeness, reverse=True)[:count]


def load_config(arguments: Sequence[str], config_name: str = "ppo_trainer") -> Config:
    """The configuration of `load` alone, for reinforcement learning."""
    config = load(arguments, config_name).config
    assert isinstance(config, Config), config_name
    return config


def load_sft_config(arguments: Sequence[str]) -> SFTConfig:
    """The configuration of `load` alone, for supervised training."""
    config: SFTConfig = load(arguments, "sft_trainer").config
    return config


def absolute_folders(config: Block, paths: Sequence[str]) -> None:
    """Make the folders of these keys absolute, in place: workers may have another working directory. What is
    no folder here (null, a name on the hub) stays.
    """
    for path in paths:
        value = at(config, path)
        if value is not None and Path(value).is_dir():
            put(config, path, str(Path(value).absolute()))
