"""What users name by package.module:name, and what an exception says of its place."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Collection
from typing import Any


def import_named(path: str, what: str, known: Collection[str]) -> Any:
    """What `path`, package.module:name, names.

    Args:
        what: the setting in messages, `env_class='maze'`. known: names that could have been meant instead.

    Raises:
        ValueError: it is no such path, or names nothing that can be imported; with the nearest name.
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
    except Exception as error:  # it is a user's module: anything may come
        raise ValueError(
            f"{what}: {module_name} can't be imported from {os.getcwd()} or PYTHONPATH ({describe(error)})"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), 1)
        hint = f" Did you mean {module_name}:{near[0]}?" if near else ""
        raise ValueError(f"{what}: found no class {name!r} in {module_name}.{hint}")
    return getattr(module, name)


def place_of(error: BaseException) -> str:
    """The line that raised an exception, the last one outside of libraries: " (file:line, in function)"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    if not frames:
        return ""
    last = own[-1] if own else frames[-1]
    return f" ({last.filename}:{last.lineno}, in {last.name})"


def describe(error: BaseException) -> str:
    """An exception of a user's code in one line, with its place."""
    message = str(error).replace("\n", " ")
    return f"{type(error).__name__}: {message[:500]}{place_of(error)}"
