"""Imports of what users name by package.module:name, and descriptions of exceptions with their place."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Collection
from typing import Any


def import_named(path: str, what: str, known: Collection[str]) -> Any:
    """Import the object that `path`, package.module:name, names.

    Args:
        path: package.module:name.
        what: the setting for messages, `env_class='maze'`.
        known: names that could have been meant instead.

    Raises:
        ValueError: `path` has no such form, or names nothing that can be imported. The message suggests the
            nearest name.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        folder, dot, last = path.rpartition(".")
        near = [f"{folder}:{last}"] if dot else difflib.get_close_matches(path.lower(), known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        expected = f"one of {', '.join(sorted(known))}, or your own as package.module:Class"
        raise ValueError(f"Found {what}; expected {expected}.{hint}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # it is a user's module, which may raise anything
        raise ValueError(
            f"{what}: {module_name} can't be imported from {os.getcwd()} or PYTHONPATH ({describe(error)})"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), 1)
        hint = f" Did you mean {module_name}:{near[0]}?" if near else ""
        raise ValueError(f"{what}: found no class {name!r} in {module_name}.{hint}")
    return getattr(module, name)


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, as " (file:line, in function)".

    This is the last line outside of libraries, or the last line of all if there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [
        frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix, "<"))
    ]
    if not frames:
        return ""
    last = own_frames[-1] if own_frames else frames[-1]
    return f" ({last.filename}:{last.lineno}, in {last.name})"


def describe(error: BaseException) -> str:
    """Describe an exception of a user's code in one line, with its place."""
    message = str(error).replace("\n", " ")
    return f"{type(error).__name__}: {message[:500]}{place_of(error)}"
