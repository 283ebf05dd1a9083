"""The names of environments: an `env_class` of a row or of the configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from verl.environments.environment import (
    EXECUTORS,
    BaseTextEnv,
    check_stop,
    env_config_of,
    make_environment,
)
from verl.plugins import load_plugins
from verl.utils.extras import check_packages
from verl.utils.importing import import_named

SEARCH = "search"  # the default, which a plugin registers (verl/plugins.py)
EntryPoint = str | Callable[..., Any]  # "package.module:Class", or a callable that makes an instance

# The entry point of each name, and the arguments that it always gets.
registry: dict[str, tuple[EntryPoint, Mapping[str, Any]]] = {
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
    """Give an environment a name.

    Args:
        id: The name.
        entry_point: "package.module:Class", or a callable that makes an instance.
        kwargs: Arguments that the entry point always gets.

    Raises:
        ValueError: If the name is taken.
    """
    if id in registry:
        raise ValueError(f"Environment {id!r} is registered already; take another name, or `deregister` it.")
    registry[id] = entry_point, dict(kwargs or {})


def deregister(id: str) -> None:
    """Remove a name.

    Raises ValueError if no environment has it.
    """
    if registry.pop(id, None) is None:
        raise ValueError(f"Found no environment {id!r}; expected one of {', '.join(sorted(registry))}.")


def load_class(env_class: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the class (or callable) of an environment, and the arguments that it always gets.

    The plugins are loaded for a name that nobody has registered yet.

    Args:
        env_class: A registered name, or package.module:Class.

    Raises:
        ValueError: If there is no such name (the message suggests the nearest one), if its module or class
            can't be loaded, or if its `runs` or `stop` has a wrong value.
    """
    if env_class not in registry:
        load_plugins()
    entry_point, kwargs = registry.get(env_class, (env_class, {}))
    cls: Any = entry_point
    if isinstance(entry_point, str):
        cls = import_named(entry_point, f"env_class={env_class!r}", registry)
    if not callable(cls):
        raise ValueError(f"Found env_class={env_class!r}, a {type(cls).__name__}; expected a class.")
    if getattr(cls, "runs", "thread") not in EXECUTORS:
        raise ValueError(f"{env_class}: found runs={cls.runs!r}; expected one of {', '.join(EXECUTORS)}.")
    if not isinstance(stop := getattr(cls, "stop", ()), property):
        check_stop(stop)
    return cls, kwargs


def check_usable(env_class: str, env_config: Mapping[str, Any]) -> None:
    """Raise ValueError if no episode of an environment can be played.

    Its class can't be loaded, a package that it needs is missing, or its settings are wrong.

    Args:
        env_class: A registered name, or package.module:Class.
        env_config: The environment's block of `environment.env_config`.
    """
    cls, _ = load_class(env_class)
    if isinstance(cls, type) and issubclass(cls, BaseTextEnv):
        check_packages(f"environment {env_class!r}", *cls.needs)
        cls.check_settings(env_config)


def make(env_class: str, **kwargs: Any) -> Any:
    """Make an instance for one episode.

    Args:
        env_class: A registered name, or package.module:Class.
        kwargs: `env_config` and `extras`, as in SkyRL.
    """
    cls, default_kwargs = load_class(env_class)
    kwargs = {**default_kwargs, **kwargs}
    if isinstance(kwargs.get("env_config"), Mapping):
        kwargs["env_config"] = env_config_of(cls, kwargs["env_config"])
    return make_environment(cls, kwargs)
