"""Algorithms by name: ours, those that you register, and those that are named by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from verl.utils.importing import describe

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Registry(Mapping[str, Fn]):
    """A table of functions by name, which reads like a dict; `register` is the way to add to it.

    For `find` a name of the form `package.module:function` is imported instead of looked up, and a member of
    any Enum stands for its value.

    Attributes:
        key: the configuration key that holds the name, for error messages.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Fn] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, name: str) -> Fn:
        return self._functions[name]

    def register(self, name: str | Enum) -> Callable[[Fn], Fn]:
        """Register a function under a name; use it as a decorator.

        Raises ValueError if another function has the name.
        """
        plain = plain_name(name)

        def decorate(fn: Fn) -> Fn:
            if self._functions.get(plain, fn) is not fn:
                raise ValueError(f"{self.key}: {plain!r} is registered already; choose another name.")
            self._functions[plain] = fn
            return fn

        return decorate

    def find(self, name: str | Enum) -> Fn:
        """Return the function of a name, or of an import path. Raises ValueError if there is none."""
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
        except Exception as error:  # it is a user's module, which may raise anything
            reason = str(error) if isinstance(error, ImportError | AttributeError) else describe(error)
            raise ValueError(
                f"{self.key}: found {name!r}, but {reason}; expected package.module:function that can be "
                "imported from where the run was started."
            ) from error
        if not callable(function):
            raise ValueError(f"{self.key}: {name} is a {type(function).__name__}, expected a function.")
        return function


def plain_name(name: str | Enum) -> str:
    """Return the name itself, or the value of an Enum's member."""
    return str(name.value) if isinstance(name, Enum) else name


def call_with(fn: Callable[..., Any], inputs: Any, label: str) -> Any:
    """Call `fn` with those fields of the dataclass `inputs` that it names as parameters.

    A field that is None is left out. A function with `**kwargs` gets all the other fields too. A function
    with a parameter called `inputs` gets the dataclass itself.

    Raises ValueError if the function needs a field that is None or that does not exist. `label` says in the
    message whose function it is.
    """
    available = {field.name: getattr(inputs, field.name) for field in fields(inputs)} | {"inputs": inputs}
    parameters = inspect.signature(fn).parameters
    arguments: dict[str, Any] = {}
    missing = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = {key: value for key, value in available.items() if key not in parameters}
            arguments |= {key: value for key, value in extra.items() if value is not None and key != "inputs"}
        elif available.get(name) is not None:
            arguments[name] = available[name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            missing.append(name)
    if missing:
        raise ValueError(f"{label} needs {', '.join(missing)}, which this batch does not have.")
    return fn(**arguments)


def named_inputs(fn: Callable[..., Any], required_only: bool = False) -> set[str]:
    """Return the names of a function's parameters, or only of those without a default if `required_only`."""
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and (p.default is p.empty or not required_only)
    }


NEEDED: Any = object()


def config_value(config: Any, name: str, label: str, default: Any = NEEDED) -> Any:
    """Return a setting of a configuration that a user gives: a mapping, or an object with attributes.

    Raises ValueError if the configuration lacks it and there is no default. `label` says in the message whose
    function it is.
    """
    value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
    if value is NEEDED:
        raise ValueError(f"{label}: found config={config!r}; expected one with {name}.")
    return value
