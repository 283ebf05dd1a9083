"""Environments by name: an `env_class` of a row or of the configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from verl.environments.base import HOW, check_stop, make_environment
from verl.utils.importing import import_named

SEARCH = "search"  # the default; `search_r1` registers it
EntryPoint = str | Callable[..., Any]  # "package.module:Class", or what makes an instance

registry: dict[str, tuple[EntryPoint, Mapping[str, Any]]] = {  # with arguments that are always given
    "single_turn": ("verl.environments.single_turn:SingleTurnEnv", {}),
    "gsm8k": ("verl.environments.gsm8k:GSM8kEnv", {}),
    "gsm8k_multi_turn": ("verl.environments.gsm8k:GSM8kMultiTurnEnv", {}),
    "aime": ("verl.environments.aime:AIMEEnv", {}),
    "text2sql": ("verl.environments.text2sql:SQLEnv", {}),
    "lcb": ("verl.environments.lcb:LCBEnv", {}),
    "searchcode": ("verl.environments.searchcode:SearchCodeEnv", {}),
    "agent": ("verl.environments.agent_function:AgentFunctionEnv", {}),
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
        ValueError: there is no such name, with the nearest one; its module or class can't be had; or its
            `runs` or `stop` are of a wrong kind.
    """
    entry_point, kwargs = registry.get(env_class, (env_class, {}))
    found: Any = entry_point
    if isinstance(entry_point, str):
        found = import_named(entry_point, f"env_class={env_class!r}", registry)
    if not callable(found):
        raise ValueError(f"Found env_class={env_class!r}, a {type(found).__name__}; expected a class.")
    if getattr(found, "runs", "thread") not in HOW:
        raise ValueError(f"{env_class}: found runs={found.runs!r}; expected one of {', '.join(HOW)}.")
    if not isinstance(stop := getattr(found, "stop", ()), property):
        check_stop(stop)
    return found, kwargs


def make(env_class: str, **kwargs: Any) -> Any:
    """An instance for one episode; kwargs: `env_config` and `extras`, as in SkyRL."""
    cls, always = load_class(env_class)
    return make_environment(cls, {**always, **kwargs})
