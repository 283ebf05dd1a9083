"""Environments by name.

register(id="maze", entry_point="my_package.maze:Maze")      env_class: maze, in a row or the configuration
make("maze", env_config={...}, extras=row)                   an instance, for one episode
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SEARCH = "search"  # the default; `search_r1` registers it


@dataclass(frozen=True)
class EnvSpec:
    """A registered environment. entry_point: "package.module:Class", or a callable. kwargs: always given."""

    id: str
    entry_point: str | Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


registry: dict[str, EnvSpec] = {}


def register(id: str, entry_point: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Gives an environment a name. ValueError: the name is taken."""
    if id in registry:
        raise ValueError(
            f"Environment {id!r} is registered already; choose another name, or `deregister` it."
        )
    registry[id] = EnvSpec(id, entry_point, dict(kwargs or {}))


def deregister(id: str) -> None:
    """Takes a name away. ValueError: there is none."""
    find_spec(id)
    del registry[id]


def find_spec(env_class: str) -> EnvSpec:
    """The environment of a name, or of package.module:Class.

    Raises:
        ValueError: there is none; the message names the nearest one.
    """
    if env_class in registry:
        return registry[env_class]
    if ":" in env_class:
        return EnvSpec(env_class, env_class)
    near = difflib.get_close_matches(env_class, registry, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Found env_class={env_class!r}; expected one of {', '.join(sorted(registry))}, or your own as "
        f"package.module:Class.{hint}"
    )


def load_class(env_class: str) -> Callable[..., Any]:
    """The class (or callable) of a name. ValueError: its module or class can't be had."""
    entry_point = find_spec(env_class).entry_point
    if callable(entry_point):
        return entry_point
    module_name, _, name = entry_point.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(f"env_class={env_class!r}: {module_name} can't be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"env_class={env_class!r}: found no class {name!r} in {module_name}")
    return found


def make(env_class: str, **kwargs: Any) -> Any:
    """An instance for one episode; kwargs: `env_config` and `extras`, as in SkyRL."""
    return load_class(env_class)(**{**find_spec(env_class).kwargs, **kwargs})


for _id, _entry_point in {
    "gsm8k": "verl.environments.gsm8k:GSM8kEnv",
    "gsm8k_multi_turn": "verl.environments.gsm8k:GSM8kMultiTurnEnv",
    "aime": "verl.environments.aime:AIMEEnv",
    "text2sql": "verl.environments.text2sql:SQLEnv",
    "lcb": "verl.environments.lcb:LCBEnv",
    "searchcode": "verl.environments.searchcode:SearchCodeEnv",
    "gymnasium": "verl.environments.adapters:GymnasiumEnv",
    "verifiers": "verl.environments.adapters:VerifiersEnv",
}.items():
    register(_id, _entry_point)
