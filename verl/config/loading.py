"""Loading of one configuration: Hydra composes it, its names are translated and checked, and it is frozen.

    ["@a.yaml", "+recipe=mixture", "trainer.seed=1", ...]
      -> layers with the schema's names (old names are translated, unknown ones refused with the nearest)
      -> Hydra merges them (verl.config.composing), OmegaConf resolves ${interpolations}
      -> checked -> Config

`+key` and `++key` mean `key` for keys of the schema (Search-R1's scripts need that), and of a repeated key
the last one counts.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomllib
import yaml

from verl.config.compatibility import DEFAULT_PASS_ROWS, RL, SFT, CompatibilityTable, num_replicas
from verl.config.keys import (
    Block,
    build,
    check_values,
    expand_home,
    get_value,
    keys_of,
    replace_values,
)
from verl.config.overrides import Argument, Folders, read_value, split
from verl.config.schema import Config, SFTConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.config.composing import ReadingLoader

VARIABLE_PREFIX = "VERL__"
COMMAND_LINE = "command line"
AnyConfig = TypeVar("AnyConfig", bound=Block)


@dataclass(frozen=True)
class Setting:
    """A key's value in one layer.

    Attributes:
        key: dotted name.
        value: the value.
        text: the value as the user wrote it, for messages.
        origin: the layer in words.
        old_key: the name under which the user set the key, if it is not the schema's.
    """

    key: str
    value: Any
    text: str
    origin: str
    old_key: str | None = None

    @property
    def full_origin(self) -> str:
        """Return the layer, and the name that the key has in it if that is another one."""
        return self.origin if self.old_key is None else f"{self.origin} ({self.old_key})"


@dataclass(frozen=True)
class Loaded:
    """A configuration, the origin of each of its values, and notes on keys that change nothing here."""

    config: Any
    origins: Mapping[str, str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Program:
    """The contents of a program's configuration.

    Attributes:
        schema: its keys.
        table: other names of keys.
        schema_name: the name of the keys in Hydra's ConfigStore, for the defaults list of a primary file.
    """

    schema: type[Block]
    table: CompatibilityTable
    schema_name: str


_REINFORCEMENT_LEARNING = Program(Config, RL, "ppo_schema")
PROGRAMS = {  # name of a shipped primary file -> what it holds
    "ppo_trainer": _REINFORCEMENT_LEARNING,
    "ppo_megatron_trainer": _REINFORCEMENT_LEARNING,
    "sft_trainer": Program(SFTConfig, SFT, "sft_schema"),
}


def load(
    arguments: Sequence[str],
    config_name: str = "ppo_trainer",
    environment: Mapping[str, str] | None = None,
    program_name: str | None = None,
    folders: Folders | None = None,
) -> Loaded:
    """Load the configuration that the layers give.

    Args:
        arguments: overrides in Hydra's grammar, `@file` or `@ file`.
        config_name: the primary file: one of PROGRAMS, or a file in `folders`.
        environment: variables; those that start with VERL__ count (default: the process's).
        program_name: one of PROGRAMS, whose keys the primary file has (default: `config_name`).
        folders: folders with files of the user's own.

    Returns:
        The configuration, with defaults that follow other keys and `~` in paths filled in. It is frozen:
        `replace_values` derives another one.

    Raises:
        ValueError: a setting can't be read, names an unknown key, or has a value that the key can't have.
    """
    program_name = program_name or config_name
    if program_name not in PROGRAMS:
        raise ValueError(
            f"Found no configuration named {program_name!r}; expected one of: {', '.join(PROGRAMS)}."
        )
    program = PROGRAMS[program_name]
    check_names(arguments, program)
    variables = os.environ if environment is None else environment
    return _Loading(program, folders).load(arguments, config_name, variables)


def check_names(arguments: Sequence[str], program: Program) -> None:
    """Raise ValueError if an argument names an unknown key; Hydra is not imported for that."""
    names = _Names(program)
    is_file = False
    for written in arguments:
        if not is_file and not written.startswith("@"):
            argument = split(written)
            may_be_group = "." not in argument.name or "/" in argument.name
            if not may_be_group and not _is_in(argument.name, "hydra"):
                names.check(argument)
        is_file = not is_file and written == "@"


class _Names:
    """The names that a program's keys have, and had.

    Args:
        program: what the configuration holds.
    """

    def __init__(self, program: Program) -> None:
        self.keys = keys_of(program.schema)
        self.table = program.table
        self.old_names = program.table.names
        self.all_names = (*self.keys, *self.old_names, *program.table.renamed)
        self.open_keys = [path for path, key in self.keys.items() if key.is_open]

    def owner(self, name: str) -> str:
        """Return the key of the schema that has this name, or is the dictionary in which it is."""
        return name if name in self.keys else next(path for path in self.keys if _is_in(name, path))

    def check(self, argument: Argument) -> None:
        """Raise ValueError if there is no key, and no group of keys, with the name of an argument."""
        if not any(_is_in(path, argument.name) for path in self.all_names):
            list(self.translated(Setting(argument.name, None, argument.written, COMMAND_LINE)))

    def translated(self, setting: Setting) -> Iterator[Setting]:
        """Yield the setting, or one for each entry of a dictionary that stands for a group of keys."""
        keys = self.keys
        table = self.table
        name = setting.key
        if name in keys or name in self.old_names or any(_is_in(name, path) for path in self.open_keys):
            yield setting
            return
        if name in table.renamed:
            yield replace(setting, key=table.renamed[name], old_key=name)
            return
        for group, new_group in table.renamed_groups.items():
            if _is_in(name, group):
                yield from self.translated(replace(setting, key=new_group + name.removeprefix(group)))
                return
        inside = [path for path in self.all_names if _is_in(path, name)]
        if inside and isinstance(setting.value, dict):
            for inner, value in setting.value.items():
                yield from self.translated(replace(setting, key=f"{name}.{inner}", value=value))
            return
        settable_keys = [path for path in keys if keys[path].must_follow is None]
        if inside:
            names_here = {table.renamed.get(path, path) for path in inside}
            names = ", ".join(path for path in settable_keys if path in names_here)
            raise ValueError(
                f"Found {setting.text!r}, but {name} is a group of keys; expected one of: {names}."
            )
        first, *others = nearest_keys(name, settable_keys)
        hint = table.removed.get(name, f"The nearest known key is {first!r} (then {', '.join(others)}).")
        raise ValueError(f"Found the unknown key {name!r} in {setting.text!r}. {hint} --help lists all keys.")


class _Loading:
    """The loading of one configuration.

    Args:
        program: what the configuration holds.
        folders: folders with files of the user's own.
    """

    def __init__(self, program: Program, folders: Folders | None) -> None:
        # Hydra takes half a second to import on a slow machine; workers, which get a configuration, never do.
        from verl.config import composing

        self._composing = composing
        self._program = program
        self._names = _Names(program)
        self._keys = keys_of(program.schema)
        self._loader: ReadingLoader = composing.ReadingLoader(folders or Folders(), self._read)
        self._layers: list[list[Setting]] = []  # as Hydra merges them, the weakest first
        self._in_memory: dict[str, list[Setting]] = {}  # config in the ConfigStore -> its settings
        composing.store_schema(program.schema_name, program.schema)

    def load(self, arguments: Sequence[str], config_name: str, environment: Mapping[str, str]) -> Loaded:
        overrides = self._overrides(arguments, environment)
        composed = self._composing.compose(self._loader, config_name, overrides)
        origins = dict.fromkeys(self._keys, "default")
        layer_of: dict[str, int] = {}
        aliases: dict[str, tuple[int, Setting]] = {}
        notes: dict[str, str | None] = {}
        unset: dict[str, Setting] = {}  # keys that a layer marks as ones that must be set
        table = self._program.table
        for number, layer in enumerate(self._layers, 1):
            for setting in layer:
                if setting.key in table.aliases:
                    aliases[setting.key] = (number, setting)
                elif setting.key in self._names.old_names:
                    notes[setting.key] = table.note(setting.key, setting.value)
                else:
                    path = self._names.owner(setting.key)
                    layer_of[path] = number
                    unset.pop(path, None)
                    if setting.value == "???":
                        unset[path] = setting
                    if origins[path] != "default" or not self._repeats_default(setting):
                        origins[path] = setting.full_origin
                    if setting.old_key in table.earlier_names and not self._is_default(setting):
                        notes[setting.key] = f"{setting.old_key} is called {setting.key} now."
        for path, setting in unset.items():
            raise ValueError(f"Found {setting.text!r}, which asks for a value; expected {path}=<value>.")
        chosen = {
            name: setting
            for name, (number, setting) in aliases.items()
            if setting.value is not None
            # A key's own name wins over an alias in the same or a lower layer.
            and (layer_of.get(table.aliases[name].key, 0) < number or table.aliases[name].joins)
        }
        for name, setting in chosen.items():
            alias = table.aliases[name]
            alias.check(name, setting.value)
            origins[alias.key] = f"{setting.origin} ({name})"
            changes = {**alias.also, **({alias.key: setting.value} if alias.convert is None else {})}
            for path, value in changes.items():
                self._composing.put(composed, path, value)
        values = self._values(composed, origins)
        config = build(self._program.schema, values)
        check_values(config)
        for name, setting in chosen.items():
            alias = table.aliases[name]
            if alias.convert is not None:
                config = replace_values(config, {alias.key: alias.convert(config, setting.value)})
        if isinstance(config, Config):
            config = replace_values(config, _dependent_values(config))
        return Loaded(config, origins, [note for note in notes.values() if note is not None])

    def _overrides(self, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the overrides for Hydra, and store the layers that Hydra does not read from files."""
        overrides = self._stored(list(self._environment_settings(environment)))
        changes: list[str] = []
        settings: list[Setting] = []
        pending = list(arguments)
        while pending:
            written = pending.pop(0)
            if written.startswith("@"):
                name = written[1:] or (pending.pop(0) if pending else "")
                overrides += self._stored(self._all_translated(_file_settings(name)))
                continue
            argument = split(written)
            if self._loader.is_group(argument.name):
                overrides.append(written)
            elif argument.name.split(".")[0] == "hydra":
                changes.append(_hydra_override(argument))
            elif argument.deletes:
                self._names.check(argument)
                name = self._program.table.renamed.get(argument.name, argument.name)
                changes.append(written.replace(argument.name, name, 1))
                settings = [entry for entry in settings if not _is_at(entry.key, name)]
            else:
                setting = self._setting(argument)
                changes = [change for change in changes if change.partition("=")[0] != f"~{argument.name}"]
                settings += self._names.translated(setting)
        return [*overrides, *self._stored(settings), *changes]

    def _stored(self, settings: list[Setting]) -> list[str]:
        """Put a layer into the ConfigStore; return the overrides that add it, or none if it is empty."""
        if not settings:
            return []
        number = len(self._in_memory)
        override = self._composing.store_layer(number, self._content(settings))
        self._in_memory[override.lstrip("+").replace("=", "/")] = settings
        return [override]

    def _read(self, name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what Hydra merges of a config: the keys of the schema, under its names."""
        settings = self._in_memory.get(name)
        if settings is None:
            group = name.rpartition("/")[0]
            if group and group in content:
                raise ValueError(
                    f"Found the config {name} without a package, so that its keys are below {group!r}; "
                    "expected the line `# @package _global_` at its beginning."
                )
            written = (Setting(str(key), value, f"{key} in {name}", name) for key, value in content.items())
            settings = self._all_translated(written)
        is_first = not self._layers
        self._layers.append(settings)
        if is_first:  # it comes after the schema, and need not be merged where it says the same
            settings = [entry for entry in settings if not self._repeats_default(entry)]
        return self._content(settings)

    def _repeats_default(self, setting: Setting) -> bool:
        """Return whether a shipped primary file has a key as the schema has it."""
        return setting.origin in PROGRAMS and self._is_default(setting)

    def _is_default(self, setting: Setting) -> bool:
        """Return whether a setting has the value that the schema gives to its key."""
        default = self._composing.defaults_of(self._program.schema).get(setting.key, setting)
        return type(default) is type(setting.value) and default == setting.value

    def _content(self, settings: Sequence[Setting]) -> dict[str, Any]:
        """Return the settings of the schema's keys as nested dictionaries."""
        content: dict[str, Any] = {}
        for setting in settings:
            if setting.key not in self._names.old_names:
                _insert(content, setting.key.split("."), setting.value)
        return content

    def _values(self, composed: DictConfig, origins: dict[str, str]) -> dict[str, Any]:
        """Return the value of each key; of one that was deleted it is the default."""
        defaults = self._composing.defaults_of(self._program.schema)
        for path in self._composing.missing(composed, defaults):
            self._composing.put(composed, path, defaults[path])
            origins[path] = "default"
        resolved = self._composing.resolve(composed)
        values: dict[str, Any] = {}
        for path, key in self._keys.items():
            value: Any = resolved
            for name in path.split("."):
                value = value[name]
            if key.follows is not None and origins[path] == "default":
                origins[path] = f"as {key.follows}"
                is_float = isinstance(values.get(key.follows), float)
            else:
                is_float = origins[path] != "default" and key.types == (float,)
            if type(value) is int and is_float:
                value = float(value)
            source = self._keys[key.follows or path] if key.must_follow else key
            values[path] = expand_home(value) if source.is_path else value
        return values

    def _environment_settings(self, environment: Mapping[str, str]) -> Iterator[Setting]:
        names = {name.lower(): name for name in self._names.all_names}
        for variable, text in sorted(environment.items()):
            if variable.startswith(VARIABLE_PREFIX):
                name = variable.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()
                argument = Argument(f"{variable}={text}", "", names.get(name, name), text)
                yield from self._names.translated(
                    replace(self._setting(argument), origin=f"environment ({variable})")
                )

    def _all_translated(self, settings: Iterator[Setting]) -> list[Setting]:
        return [translated for setting in settings for translated in self._names.translated(setting)]

    def _setting(self, argument: Argument) -> Setting:
        name = self._program.table.renamed.get(argument.name, argument.name)
        try:
            value = read_value(argument.text or "", self._keys.get(name))
        except ValueError as error:
            raise ValueError(f"Found {argument.written!r}{error}") from None
        return Setting(argument.name, value, argument.written, COMMAND_LINE)


HYDRA_KEYS = [
    "hydra.searchpath",
    "hydra.sweep.",
    "hydra.sweeper.",
    "hydra.launcher.",
    "hydra.callbacks.",
    "hydra.verbose",
    "hydra.job.env_set",
    "hydra.job.config.override_dirname.",
]


def _hydra_override(argument: Argument) -> str:
    """Return an override of Hydra's own configuration. Raise ValueError if it has no meaning here."""
    if not argument.name.startswith(tuple(HYDRA_KEYS)):
        raise ValueError(
            f"Found the unknown key {argument.name!r} in {argument.written!r}. Nothing is written through "
            "Hydra; the run's folder is trainer.default_local_dir. Of Hydra's keys there are "
            f"{', '.join(key.rstrip('.') for key in HYDRA_KEYS)}. --help lists all keys."
        )
    return argument.written


def _insert(content: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Set an entry of nested dictionaries; a dictionary is merged with the one that is there."""
    name, *rest = names
    if rest:
        inner = content.get(name)
        if not isinstance(inner, dict):
            inner = content[name] = {}
        _insert(inner, rest, value)
    elif isinstance(value, dict) and isinstance(content.get(name), dict):
        for inner_name, inner_value in value.items():
            _insert(content[name], [inner_name], inner_value)
    else:
        content[name] = value


def _dependent_values(config: Config) -> dict[str, Any]:
    """Return the values that depend on several keys."""
    values: dict[str, Any] = {}
    for name, rows in DEFAULT_PASS_ROWS.items():  # these stay null where passes are formed by tokens
        if (
            get_value(config, f"{name}_per_gpu") is None
            and not config.actor_rollout_ref.actor.use_dynamic_bsz
        ):
            values[f"{name}_per_gpu"] = max(1, rows // num_replicas(config))
    return values


def _file_settings(name: str) -> Iterator[Setting]:
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"Found @{name}; expected a file that ends in .yaml, .yml or .toml.")
    if not path.is_file():
        raise ValueError(f"Found no file at @{name}; expected a yaml or toml file with keys.")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if path.suffix == ".toml":
            content: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        else:
            content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}; expected keys with values.")
    for key, value in content.items():
        yield Setting(str(key), value, f"{key} in {path}", str(path))


def _is_in(name: str, group: str) -> bool:
    return name.startswith(group + ".")


def _is_at(name: str, group: str) -> bool:
    return name == group or _is_in(name, group)


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


def absolute_folders(config: AnyConfig, paths: Sequence[str]) -> AnyConfig:
    """Return the configuration with the folders of these keys absolute, for workers that start elsewhere.

    A value that is no folder here (null, a name on the hub) stays as it is.
    """
    values = {path: get_value(config, path) for path in paths}
    folders = {
        path: str(Path(value).absolute())
        for path, value in values.items()
        if value is not None and Path(value).is_dir()
    }
    return replace_values(config, folders)
