"""Algorithms by name: ours, those that a user registers, and those that are named by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, Generic, TypeVar

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Registry(Generic[Fn]):
    """name -> function. A name of the form `package.module:function` is imported instead of looked up. A
    member of any Enum stands for its value. key: the configuration key that holds the name, for error
    messages.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Fn] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def register(self, name: str | Enum) -> Callable[[Fn], Fn]:
        """Decorator: makes a function known under a name. ValueError if another one has it."""
        plain = plain_name(name)

        def decorate(fn: Fn) -> Fn:
            if self._functions.get(plain, fn) is not fn:
                raise ValueError(f"{self.key}: {plain!r} is registered already; choose another name.")
            self._functions[plain] = fn
            return fn

        return decorate

    def get(self, name: str | Enum) -> Fn:
        """The function of a name, or of an import path. ValueError if there is none."""
        name = plain_name(name)
        if name in self._functions:
            return self._functions[name]
        if ":" not in name:
            raise ValueError(
                f"{self.key}: found {name!r}, expected one of {', '.join(self)}, or package.module:function."
            )
        module_name, _, attribute = name.partition(":")
        try:
            function = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.key}: found {name!r}, but {error}; expected package.module:function that can be "
                "imported from where the run was started."
            ) from error
        if not callable(function):
            raise ValueError(f"{self.key}: {name} is a {type(function).__name__}, expected a function.")
        return function


def plain_name(name: str | Enum) -> str:
    """The name itself, or the value of an Enum's member."""
    return str(name.value) if isinstance(name, Enum) else name


def call_with(fn: Callable[..., Any], inputs: Any, what: str) -> Any:
    """Calls `fn` with those fields of the dataclass `inputs` that it names as parameters.

    A field that is None is left out. A function with `**kwargs` gets all the others too; one with a parameter
    called `inputs` gets the dataclass itself. ValueError: it needs a field that is None or not there; `what`
    says whose function it is.
    """
    available = {field.name: getattr(inputs, field.name) for field in fields(inputs)} | {"inputs": inputs}
    parameters = inspect.signature(fn).parameters
    arguments: dict[str, Any] = {}
    missing = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = {key: value for key, value in available.items() if key not in parameters}
            arguments |= {key: value for key, value in rest.items() if value is not None and key != "inputs"}
        elif available.get(name) is not None:
            arguments[name] = available[name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            missing.append(name)
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}, which this batch does not have.")
    return fn(**arguments)


def named_inputs(fn: Callable[..., Any], required_only: bool = False) -> set[str]:
    """The names of a function's parameters; of those without a default alone, if `required_only`."""
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and (p.default is p.empty or not required_only)
    }
