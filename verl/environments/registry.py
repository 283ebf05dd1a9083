"""Environments by name: an `env_class` of a row or of the configuration."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from verl.environments.base import make_environment

SEARCH = "search"  # the default; `search_r1` registers it
EntryPoint = str | Callable[..., Any]  # "package.module:Class", or what makes an instance

registry: dict[str, tuple[EntryPoint, Mapping[str, Any]]] = {  # with arguments that are always given
    "gsm8k": ("verl.environments.gsm8k:GSM8kEnv", {}),
    "gsm8k_multi_turn": ("verl.environments.gsm8k:GSM8kMultiTurnEnv", {}),
    "aime": ("verl.environments.aime:AIMEEnv", {}),
    "text2sql": ("verl.environments.text2sql:SQLEnv", {}),
    "lcb": ("verl.environments.lcb:LCBEnv", {}),
    "searchcode": ("verl.environments.searchcode:SearchCodeEnv", {}),
    "gymnasium": ("verl.environments.adapters:GymnasiumEnv", {}),
    "verifiers": ("verl.environments.adapters:VerifiersEnv", {}),
}


def register(id: str, entry_point: EntryPoint, kwargs: Mapping[str, Any] | None = None) -> None:
    """Gives an environment a name. ValueError: the name is taken."""
    if id in registry:
        raise ValueError(f"Environment {id!r} is registered already; take another name, or `deregister` it.")
    registry[id] = entry_point, dict(kwargs or {})


def deregister(id: str) -> None:
    """Takes a name away. ValueError: there is none."""
    if registry.pop(id, None) is None:
        raise ValueError(f"Found no environment {id!r}; expected one of {', '.join(sorted(registry))}.")


def load_class(env_class: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The class (or callable) of a name or of package.module:Class, and the arguments it is always given.

    Raises:
        ValueError: there is no such name, with the nearest one; or its module or class can't be had.
    """
    entry_point, kwargs = registry.get(env_class, (env_class, {}))
    if callable(entry_point):
        return entry_point, kwargs
    module_name, colon, name = entry_point.partition(":")
    if not colon:
        near = difflib.get_close_matches(env_class, registry, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"Found env_class={env_class!r}; expected one of {', '.join(sorted(registry))}, or your own as "
            f"package.module:Class.{hint}"
        )
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(f"env_class={env_class!r}: {module_name} can't be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"env_class={env_class!r}: found no class {name!r} in {module_name}")
    return found, kwargs


def make(env_class: str, **kwargs: Any) -> Any:
    """An instance for one episode; kwargs: `env_config` and `extras`, as in SkyRL."""
    cls, always = load_class(env_class)
    return make_environment(cls, {**always, **kwargs})
