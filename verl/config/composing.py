"""Composition by Hydra: from files, groups, the environment and the command line to one configuration.

    ppo_schema       the dataclasses of verl.config, in Hydra's ConfigStore
    < ppo_trainer    the primary file, verl/trainer/config/ppo_trainer.yaml, and what its defaults list names
    < environment    VERL__TRAINER__SEED=1
    < +recipe=NAME and @ FILE, in the order of the command line
    < key=value

Each of them is a config in Hydra's defaults list, and Hydra merges them. This module passes each config to a
reader before it is merged. The reader translates old names and notes the origins of values.

What Hydra composes of a shipped primary file is kept for the process. Where the arguments choose no recipe
and no other folder, their layers are merged with a copy of it, which takes half of the time.

Importing this module takes half a second on a slow machine, so `verl.config.loading` does it when it loads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from verl.config.keys import Block, keys_of, nested
from verl.config.overrides import Folders

PRIMARY_FILES = Path(__file__).resolve().parents[1] / "trainer" / "config"
MEMORY = "verl_layer_"  # groups of the configs that are no files: the environment, @ files, the command line
Reader = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


class _ParsedFiles(FileConfigSource):
    """A source of configs in files. It parses a file once in a process, and again if the file changes."""

    parsed: ClassVar[dict[tuple[Path, int], tuple[ConfigResult, Any]]] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        key = (file, file.stat().st_mtime_ns if file.is_file() else 0)
        if key not in self.parsed:
            result = super().load_config(config_path)
            self.parsed[key] = (result, OmegaConf.to_container(result.config, resolve=False))
        result, content = self.parsed[key]
        return replace(result, config=OmegaConf.create(content), header=dict(result.header))


class ReadingLoader(ConfigLoaderImpl):
    """Hydra's loader, which shows each config to a reader and merges what the reader returns.

    Args:
        folders: the user's folders.
        read: gets a config's name and content, and returns the content with the names of the schema.
    """

    def __init__(self, folders: Folders, read: Reader) -> None:
        Plugins.instance()  # registers the kinds of sources
        setup_globals()  # registers the resolver `now`
        path = ConfigSearchPathImpl()
        path.append("hydra", "pkg://hydra.conf")
        path.append("main", f"file://{_existing(folders.path, '--config-path')}")
        if folders.path is not None:
            path.append("verl", f"file://{PRIMARY_FILES}")
        if folders.directory is not None:
            path.append("command-line", f"file://{_existing(folders.directory, '--config-dir')}")
        path.append("schema", "structured://")
        super().__init__(path)
        self._read = read
        self._folders = folders
        self._is_read: list[tuple[str, Mapping[str, Any]]] = []  # names and contents, in the order of merging
        for number, source in enumerate(self.repository.sources):
            if source.scheme() == "file":
                self.repository.sources[number] = _ParsedFiles(source.provider, source.path)

    def is_group(self, name: str) -> bool:
        """Return whether an override of this name chooses a config, and sets no key."""
        group = name.partition("@")[0]
        return group.startswith("hydra/") or self.repository.group_exists(group)

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        name = str(default.config_path)
        is_of_hydra = name.startswith("hydra/")
        is_schema = result.is_schema_source and not name.startswith(MEMORY)
        if is_of_hydra or is_schema or not isinstance(result.config, DictConfig):
            return result
        content: Any = OmegaConf.to_container(result.config, resolve=False)
        of_hydra = {key: content.pop(key) for key in ("hydra", "defaults") if key in content}
        self._is_read.append((name, content))
        translated = copy.copy(result)
        translated.config = OmegaConf.create({**self._read(name, content), **of_hydra})
        return translated

    def compose(self, config_name: str, overrides: Sequence[str]) -> DictConfig:
        """Return the merged configs without Hydra's own keys, and with interpolations unresolved."""
        layers = [override for override in overrides if override.startswith(f"+{MEMORY}")]
        if self._folders != Folders() or len(layers) < len(overrides):
            return self._compose_anew(config_name, overrides)
        key = (config_name, *(file.stat().st_mtime_ns for file in sorted(PRIMARY_FILES.glob("*.yaml"))))
        if key in _composed:
            config, is_read = _composed[key]
            for name, content in is_read:
                self._read(name, content)
        else:
            config = self._compose_anew(config_name, [])
            _composed[key] = (config, self._is_read)
        config = copy.deepcopy(config)
        for layer in layers:
            content = self._read(layer.lstrip("+").replace("=", "/"), {})
            config.merge_with(OmegaConf.create(dict(content)))
        return config

    def _compose_anew(self, config_name: str, overrides: Sequence[str]) -> DictConfig:
        config = self.load_configuration(config_name, list(overrides), RunMode.RUN)
        OmegaConf.set_struct(config, False)
        del config["hydra"]
        return config


# (primary file, times of the shipped files) -> what Hydra composes of it, and the configs in that
_composed: dict[tuple[object, ...], tuple[DictConfig, list[tuple[str, Mapping[str, Any]]]]] = {}


def _existing(folder: str | None, option: str) -> Path:
    """Return a folder's absolute path, or that of the primary files for None."""
    path = PRIMARY_FILES if folder is None else Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"Found no folder at {option} {folder}; expected one with yaml files.")
    return path


@cache
def store_schema(name: str, block: type[Block]) -> None:
    """Put the keys of a program into the ConfigStore, with their defaults; a default may be `${key}`."""
    ConfigStore.instance().store(name=name, node=nested(defaults_of(block)))


@cache
def defaults_of(block: type[Block]) -> dict[str, Any]:
    """Return the default of each key as a primary file has it: `${key}` where it follows another key."""
    return {
        path: f"${{{spec.follows}}}" if spec.follows else spec.default
        for path, spec in keys_of(block).items()
    }


def store_layer(number: int, content: Mapping[str, Any]) -> str:
    """Put a config into the ConfigStore, and return the override that adds it to the defaults list."""
    group = f"{MEMORY}{number}"
    ConfigStore.instance().store(group=group, name="values", node=dict(content), package="_global_")
    return f"+{group}=values"


def compose(loader: ReadingLoader, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra composes, with interpolations unresolved.

    Raises ValueError, with one line, for what can't be composed.
    """
    try:
        return loader.compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file == config_name:
            folders = ", ".join(source.path for source in loader.get_sources() if source.scheme() == "file")
            raise ValueError(
                f"Found no {config_name}.yaml in {folders}; expected it in one of these."
            ) from None
        raise ValueError(one_line(error)) from None


def missing(config: DictConfig, paths: Iterable[str]) -> list[str]:
    """Return the dotted names that the configuration lacks."""
    content = OmegaConf.to_container(config, resolve=False)

    def is_there(path: str) -> bool:
        value: Any = content
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return False
            value = value[name]
        return True

    return [path for path in paths if not is_there(path)]


def put(config: DictConfig, path: str, value: Any) -> None:
    """Set the key with this dotted name."""
    OmegaConf.update(config, path, value, merge=False, force_add=True)


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return the values as nested dictionaries, with interpolations resolved.

    Raises ValueError, with one line, if an interpolation can't be resolved.
    """
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        path = str(error.full_key)
        written = f"{path}={_written_value(config, path)}"
        reason = one_line(error).partition(" full_key: ")[0]
        if isinstance(error, InterpolationKeyError):
            name = reason.split("'")[1]
            raise ValueError(f"Found ${{{name}}} in {written}; there is no such key.") from None
        if "Recursive interpolation" in reason:
            raise ValueError(f"Found {written}, which leads back to itself; expected a value.") from None
        raise ValueError(f"Found {written}; expected a value, but: {reason}.") from None
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _written_value(config: DictConfig, path: str) -> Any:
    value: Any = OmegaConf.to_container(config, resolve=False)
    for name in re.findall(r"[^.\[\]]+", path):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def one_line(error: Exception) -> str:
    """Return the message of an error, or of its cause if it has none, in one line."""
    text = str(error) or str(error.__cause__)
    return " ".join(text.split()).partition(" Config search path:")[0]
