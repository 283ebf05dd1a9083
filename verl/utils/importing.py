"""Imports of what users name by package.module:name, and descriptions of exceptions with their place."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.extras import hint_for


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
        hint = hint_for(error.name) if isinstance(error, ImportError) else ""
        folders = f"{os.getcwd()} or PYTHONPATH"
        raise ValueError(
            f"{what}: {module_name} can't be imported from {folders} ({describe(error)}).{hint}"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), 1)
        hint = f" Did you mean {module_name}:{near[0]}?" if near else ""
        raise ValueError(f"{what}: found no class {name!r} in {module_name}.{hint}")
    return getattr(module, name)


def import_file(path: str | Path, setting: str) -> ModuleType:
    """Import a user's Python file, once in a process.

    The file's folder becomes importable, so that the file finds the modules beside it, and processes that it
    starts find the file. The module has the file's name, unless another module has it already.

    Args:
        path: The file; "~" is expanded.
        setting: The setting that names the file, for messages.

    Raises:
        ValueError: The file is no Python file, or it can't be imported. The message names its line.
    """
    file = Path(path).expanduser().absolute()
    loaded = [module for module in list(sys.modules.values()) if _comes_from(module, file)]
    if loaded:
        return loaded[0]
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # behind all others, so that no file beside it hides a library
    importlib.invalidate_caches()
    name = file.stem
    known = None
    with suppress(ImportError, ValueError, AttributeError):
        known = importlib.util.find_spec(name)
    is_free = name.isidentifier() and name not in sys.modules
    if not is_free or known is None or known.origin != str(file):
        name = f"user_file_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"Found {setting}={path}; expected a python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(
            f"Found {setting}={path}, which can't be imported ({_describe_import(error, file)}); expected a "
            "python file that runs"
        ) from error
    return module


def _comes_from(module: Any, file: Path) -> bool:
    return getattr(module, "__file__", None) == str(file) and getattr(module, "__name__", "") != "__main__"


def _describe_import(error: BaseException, file: Path) -> str:
    """Describe why a user's file can't be imported, with the file's own line."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(error, SyntaxError):
        return f"{message} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{message} ({file}:{lines[-1]})" if lines else message


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
