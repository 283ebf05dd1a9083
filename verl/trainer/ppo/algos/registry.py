"""Algorithms by name: ours, a user's registered ones, and those that are named by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Registry(Generic[Fn]):
    """name -> function. A name of the form `package.module:function` is imported instead of looked up.

    Args:
        key: the configuration key that holds the name, for error messages.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Fn] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def register(self, name: str) -> Callable[[Fn], Fn]:
        """Decorator: makes a function known under a name. ValueError if another one has it."""

        def decorate(fn: Fn) -> Fn:
            if self._functions.get(name, fn) is not fn:
                raise ValueError(f"{self.key}: {name!r} is registered already; choose another name.")
            self._functions[name] = fn
            return fn

        return decorate

    def get(self, name: str) -> Fn:
        """The function of a name, or of an import path. ValueError if there is none."""
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return self._imported(name)
        raise ValueError(
            f"{self.key}: found {name!r}, expected one of {', '.join(self)}, or package.module:function."
        )

    def _imported(self, path: str) -> Fn:
        module_name, _, attribute = path.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.key}: found {path!r}, but {error}; expected package.module:function that can be "
                "imported from where the run was started."
            ) from error
        if not callable(found):
            raise ValueError(f"{self.key}: {path} is a {type(found).__name__}, expected a function.")
        return found


def call_with(fn: Callable[..., Any], available: Mapping[str, Any], what: str) -> Any:
    """Calls `fn` with those of the `available` arguments that it names as parameters.

    Raises:
        ValueError: it needs one that is None or not there; `what` says whose function it is.
    """
    inputs: dict[str, Any] = {}
    missing = []
    for name, parameter in inspect.signature(fn).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if available.get(name) is not None:
            inputs[name] = available[name]
        elif required and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            missing.append(name)
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}, which this batch does not have.")
    return fn(**inputs)
