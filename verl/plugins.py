"""Plugins: packages on top of verl provide objects that its programs need.

    PACKAGE/verl_plugin.py --provide(name, "package.module:object")--> hooks
    a program              --hook(name)--> loads all plugins once, imports the object, returns it

A plugin is a package in the folder where the package verl is, with a module `verl_plugin`. Loading one
registers names (environments, hooks) and imports nothing that is slow. verl imports no such package by name.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

MODULE = "verl_plugin"
HOOKS = {
    "agent_factory": "config -> a function (tokenizer, engine) -> the agent of a run, which can be pickled",
    "trajectory_metrics": "records of a batch's trajectories -> its metrics",
    "retrieval_probe": "() -> an object that asks the run's retrieval servers, for the preflight",
    "check_search": "config -> None; raises ValueError if no search server answers",
    "text_encoder": "folder or name of a text encoder -> a function texts -> vectors",
    "benchmark_file": "(name of a benchmark, folder) -> the file of its rows, made if it is not there",
    "fetch_model": "name of a model on a hub -> its folder",
    "corpus_questions": "template or None -> writes rows that ask for questions, and rows of the questions",
}
"""The hooks that programs ask for, each with what it takes and gives."""

_provided: dict[str, str] = {}


def provide(name: str, entry_point: str) -> None:
    """Register the object of a hook.

    Args:
        name: A name in `HOOKS`.
        entry_point: "package.module:object". It is imported when a program first asks for the hook.

    Raises:
        ValueError: If there is no such hook, or if another plugin has given it an object.
    """
    if name not in HOOKS:
        raise ValueError(f"Found hook {name!r}; expected one of {', '.join(HOOKS)}.")
    if name in _provided:
        raise ValueError(
            f"Found two objects for the hook {name!r}: {_provided[name]} and {entry_point}; expected one."
        )
    _provided[name] = entry_point


@cache
def load_plugins() -> tuple[str, ...]:
    """Import all plugins, and return their names. Later calls do nothing."""
    folder = Path(__file__).resolve().parents[1]
    names = sorted(file.parent.name for file in folder.glob(f"*/{MODULE}.py"))
    for name in names:
        importlib.import_module(f"{name}.{MODULE}")
    return tuple(names)


def hook(name: str) -> Any:
    """Return the object of a hook.

    Raises ValueError if no plugin provides it.
    """
    plugins = load_plugins()
    if name not in _provided:
        loaded = ", ".join(plugins) or "none"
        raise ValueError(
            f"Found no object for the hook {name!r} in the plugins ({loaded}); expected a package beside "
            f"verl whose module {MODULE} provides it."
        )
    module, _, attribute = _provided[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
