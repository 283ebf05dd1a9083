"""Loading of one configuration from its layers: defaults < environment < files < key=value.

    ["@a.yaml", "trainer.seed=1", "+trainer.val_only=true", ...] -> settings -> checked -> Config

The message about a misspelt key names its nearest neighbour. `+key` and `++key` mean `key` (Search-R1's
scripts need that), and of a repeated key the last one counts.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomllib
import yaml

from verl.config.compatibility import DEFAULT_PASS_ROWS, RL, SFT, CompatibilityTable, num_replicas
from verl.config.keys import (
    Block,
    Key,
    check_values,
    expand_home,
    format_value,
    get_value,
    keys_of,
    set_value,
)
from verl.config.schema import Config, SFTConfig
from verl.config.values import YamlLoader, parse_value

VARIABLE_PREFIX = "VERL__"


@dataclass(frozen=True)
class Setting:
    """A key's value in one layer.

    Attributes:
        key: dotted name.
        value: the value.
        text: the value as the user wrote it, for messages.
        layer: 1 is the environment, 2 and so on are files, the last one is the command line.
        origin: the layer in words.
    """

    key: str
    value: Any
    text: str
    layer: int
    origin: str


@dataclass(frozen=True)
class Loaded:
    """A configuration, the origin of each of its values, and notes on keys that change nothing here."""

    config: Any
    origins: Mapping[str, str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Program:
    """A configuration with a name; `preset` maps dotted names to defaults that replace the schema's."""

    schema: type[Block]
    table: CompatibilityTable
    preset: Mapping[str, Any] = field(default_factory=dict)


PROGRAMS = {
    "ppo_trainer": Program(Config, RL),
    "ppo_megatron_trainer": Program(Config, RL, {"actor_rollout_ref.actor.strategy": "megatron"}),
    "sft_trainer": Program(SFTConfig, SFT),
}


def load(
    arguments: Sequence[str],
    config_name: str = "ppo_trainer",
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Load the configuration that the layers give.

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
    if config_name not in PROGRAMS:
        raise ValueError(
            f"Found no configuration named {config_name!r}; expected one of: {', '.join(PROGRAMS)}."
        )
    program = PROGRAMS[config_name]
    keys = keys_of(program.schema)
    table = program.table
    values = {path: spec.default for path, spec in keys.items()} | dict(program.preset)
    origins = dict.fromkeys(keys, "default") | dict.fromkeys(program.preset, config_name)
    aliases: dict[str, Setting] = {}
    layer_of: dict[str, int] = {}
    notes: dict[str, str | None] = {}
    for written in _layers(arguments, os.environ if environment is None else environment, keys, table):
        for setting in _named(written, program):
            name = setting.key
            value = setting.value
            if name in table.aliases:
                aliases[name] = setting
            elif name in table.names:
                notes[name] = table.note(name, value)
            else:
                if name not in keys:  # it is in a dictionary in which any key may be set
                    owner = next(path for path in keys if keys[path].is_open and _is_in(name, path))
                    value = _with_entry(values[owner], name.removeprefix(owner + "."), value)
                    name = owner
                if type(value) is int and keys[name].types == (float,):
                    value = float(value)
                values[name] = value
                origins[name] = setting.origin
                layer_of[name] = setting.layer
    # A key's own name wins over an alias in the same or a lower layer.
    aliases = {
        name: setting
        for name, setting in aliases.items()
        if setting.value is not None
        and (layer_of.get(table.aliases[name].key, 0) < setting.layer or table.aliases[name].joins)
    }
    for name, setting in aliases.items():
        alias = table.aliases[name]
        alias.check(name, setting.value)
        values.update(alias.also)
        if alias.convert is None:
            values[alias.key] = setting.value
        origins[alias.key] = f"{setting.origin} ({name})"
    _resolve(values, keys, origins)
    config = program.schema()
    for path, value in values.items():
        source = keys[keys[path].follows or path] if keys[path].must_follow else keys[path]
        set_value(config, path, expand_home(value) if source.is_path else value)
    check_values(config)
    for name, setting in aliases.items():
        alias = table.aliases[name]
        if alias.convert is not None:
            set_value(config, alias.key, alias.convert(config, setting.value))
    if isinstance(config, Config):
        _complete(config)
    return Loaded(config, origins, [note for note in notes.values() if note is not None])


def _with_entry(dictionary: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a dictionary with one more entry, at a dotted name."""
    name, _, rest = path.partition(".")
    return {**dictionary, name: _with_entry(dictionary.get(name) or {}, rest, value) if rest else value}


def _complete(config: Config) -> None:
    """Fill in, in place, what depends on several keys."""
    for name, rows in DEFAULT_PASS_ROWS.items():  # these stay null where passes are formed by tokens
        if (
            get_value(config, f"{name}_per_gpu") is None
            and not config.actor_rollout_ref.actor.use_dynamic_bsz
        ):
            set_value(config, f"{name}_per_gpu", max(1, rows // num_replicas(config)))


def _layers(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    keys: Mapping[str, Key],
    table: CompatibilityTable,
) -> Iterator[Setting]:
    """Yield all settings, the weakest layer first."""

    def value(name: str, text: str, written: str) -> Any:
        declared = keys.get(name)
        is_text = declared is not None and declared.types == (str,)
        try:
            return parse_value(text, is_text=is_text, nullable=declared is None or declared.nullable)
        except ValueError as error:
            raise ValueError(f"Found {written!r}{error}") from None

    names = {name.lower(): name for name in (*keys, *table.names)}
    for variable, text in sorted(environment.items()):
        if variable.startswith(VARIABLE_PREFIX):
            name = variable.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()
            name = names.get(name, name)
            written = f"{variable}={text}"
            yield Setting(name, value(name, text, written), written, 1, f"environment ({variable})")
    layer = 2
    pending = list(arguments)
    settings = []
    while pending:
        argument = pending.pop(0)
        if argument.startswith("@"):
            yield from _file_settings(argument[1:] or (pending.pop(0) if pending else ""), layer)
            layer += 1
        else:
            settings.append(argument)
    for argument in settings:
        name, text = _split(argument)
        yield Setting(name, value(name, text, argument), argument, layer, "command line")


def _file_settings(name: str, layer: int) -> Iterator[Setting]:
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"Found @{name}; expected a file that ends in .yaml, .yml or .toml.")
    if not path.is_file():
        raise ValueError(f"Found no file at @{name}; expected a yaml or toml file with keys.")
    text = path.read_text(encoding="utf-8")
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, YamlLoader)  # noqa: S506
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise ValueError(f"{path}: found {type(content).__name__}; expected keys with values.")
    for key, value in (content or {}).items():
        yield Setting(str(key), value, f"{key} in {path}", layer, str(path))


def _split(argument: str) -> tuple[str, str]:
    """Return the key of an argument, and its value as text."""
    name, equals, text = argument.lstrip("+").partition("=")
    if argument.startswith("~"):
        raise ValueError(f"Found {argument!r}; a key cannot be removed. Set {name[1:]}=null or leave it out.")
    if argument.startswith("-"):
        raise ValueError(f"Found the option {argument!r}; expected key=value. --help lists the keys.")
    if not equals:
        raise ValueError(f"Found {argument!r}; expected key=value.")
    if re.fullmatch("[A-Z][A-Z0-9_]+", name):
        raise ValueError(
            f"Found the unknown key {name!r} in {argument!r}. An environment variable goes before the "
            f"command: {name}={text} bash <the script> ... --help lists all keys."
        )
    return name.strip(), text


def _named(setting: Setting, program: Program) -> Iterator[Setting]:
    """Yield the setting, or one for each entry of a dictionary that stands for a group of keys."""
    keys = keys_of(program.schema)
    table = program.table
    name = setting.key
    if name in keys or name in table.names or any(_is_in(name, path) for path in keys if keys[path].is_open):
        yield setting
        return
    for group, new_group in table.renamed_groups.items():
        if _is_in(name, group):
            yield from _named(replace(setting, key=new_group + name.removeprefix(group)), program)
            return
    inside = [path for path in (*keys, *table.names) if _is_in(path, name)]
    if inside and isinstance(setting.value, dict):
        for inner, value in setting.value.items():
            yield from _named(replace(setting, key=f"{name}.{inner}", value=value), program)
        return
    settable_keys = [path for path in keys if keys[path].must_follow is None]
    if inside:
        names = ", ".join(path for path in settable_keys if path in inside)
        raise ValueError(f"Found {setting.text!r}, but {name} is a group of keys; expected one of: {names}.")
    first, *others = nearest_keys(name, settable_keys)
    hint = table.removed.get(name, f"The nearest known key is {first!r} (then {', '.join(others)}).")
    if name.split(".")[0] == "hydra":
        hint = "Nothing is written through Hydra; the run's folder is trainer.default_local_dir."
    raise ValueError(f"Found the unknown key {name!r} in {setting.text!r}. {hint} --help lists all keys.")


def _is_in(name: str, group: str) -> bool:
    return name.startswith(group + ".")


def _resolve(values: dict[str, Any], keys: Mapping[str, Key], origins: dict[str, str]) -> None:
    """Fill in, in place, defaults that follow other keys, and `${key}` in texts."""

    def resolved(path: str, waiting: tuple[str, ...] = ()) -> Any:
        if path not in values:
            raise ValueError(
                f"Found ${{{path}}} in {waiting[-1]}={values[waiting[-1]]}; there is no such key."
            )
        if path in waiting:
            raise ValueError(f"Found {path}={values[path]}, which leads back to itself; expected a value.")
        source = keys[path].follows
        chain = (*waiting, path)
        if source is not None and origins[path] == "default":
            values[path] = resolved(source, chain)
            origins[path] = f"as {source}"
        value = values[path]
        if isinstance(value, str):
            only_key = re.fullmatch(r"\$\{([\w.]+)\}", value)
            text = re.sub(r"\$\{([\w.]+)\}", lambda match: format_value(resolved(match[1], chain)), value)
            values[path] = resolved(only_key[1], chain) if only_key else text
        return values[path]

    for path in keys:
        resolved(path)


def nearest_keys(name: str, known: Sequence[str], count: int = 3) -> list[str]:
    """Return the known keys that look most like `name`, best first.

    A missing front part of `name` counts as no difference.
    """
    depth = name.count(".") + 1

    def likeness(candidate: str) -> tuple[float, float]:
        tail = ".".join(candidate.split(".")[-depth:])
        ratios = [difflib.SequenceMatcher(None, name, text).ratio() for text in (candidate, tail)]
        last = difflib.SequenceMatcher(None, name.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(ratios) + 0.5 * last, ratios[0]

    return sorted(known, key=likeness, reverse=True)[:count]


def load_config(arguments: Sequence[str], config_name: str = "ppo_trainer") -> Config:
    """Return only the configuration of `load`, for reinforcement learning."""
    config = load(arguments, config_name).config
    assert isinstance(config, Config), config_name
    return config


def load_sft_config(arguments: Sequence[str]) -> SFTConfig:
    """Return only the configuration of `load`, for supervised training."""
    config: SFTConfig = load(arguments, "sft_trainer").config
    return config


def absolute_folders(config: Block, paths: Sequence[str]) -> None:
    """Make the folders of these keys absolute, in place, because workers may have another working directory.

    A value that is no folder here (null, a name on the hub) stays as it is.
    """
    for path in paths:
        value = get_value(config, path)
        if value is not None and Path(value).is_dir():
            set_value(config, path, str(Path(value).absolute()))
