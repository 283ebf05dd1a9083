"""Arguments of the command line in Hydra's grammar: key=value, +key=value, ++key=value, ~key, +group=option.

A value that the grammar refuses is read as people write it: `~/a b.parquet` and `http://host/x?y={z}` are
texts, and a list or a dictionary may be yaml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import yaml

from verl.config.keys import Key

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

_NO_END = (
    ", where a quote or a bracket has no end, or something follows a value; put a value with special "
    "characters in quotes that reach the program, for example key='\"...\"'."
)
_SWEEP = ", a sweep; expected one value, or --multirun for a run of each. A list is written key=[a,b]."


@dataclass(frozen=True)
class Folders:
    """Folders with configs of the user's own, as the command line names them.

    Attributes:
        path: replaces the folder of the primary files, which then comes last (`--config-path`).
        directory: is searched besides (`--config-dir`).
    """

    path: str | None = None
    directory: str | None = None


@dataclass(frozen=True)
class Argument:
    """An argument of the command line.

    Attributes:
        written: the argument as the user wrote it.
        mark: what stands before its name: "+", "++", "~" or nothing.
        name: the key, or the group.
        text: the value as text; None if there is no "=".
    """

    written: str
    mark: str
    name: str
    text: str | None

    @property
    def deletes(self) -> bool:
        return self.mark == "~"


def split(written: str) -> Argument:
    """Return the pieces of an argument. Raise ValueError if it is none that sets or deletes a key."""
    match = re.match(r"(\+\+|\+|~)?(.*)", written.strip(), re.DOTALL)
    assert match is not None  # it matches any text
    mark = match[1] or ""
    name, equals, text = match[2].partition("=")
    name = name.strip()
    if written.startswith("-"):
        raise ValueError(f"Found the option {written!r}; expected key=value. --help lists the keys.")
    if not equals and mark != "~":
        raise ValueError(f"Found {written!r}; expected key=value.")
    if re.fullmatch("[A-Z][A-Z0-9_]+", name):
        raise ValueError(
            f"Found the unknown key {name!r} in {written!r}. An environment variable goes before the "
            f"command: {name}={text} bash <the script> ... --help lists all keys."
        )
    return Argument(written, mark, name, text.strip() if equals else None)


def read_value(text: str, key: Key | None = None) -> Any:
    """Return the value that a text stands for.

    Args:
        text: the text.
        key: the key whose value it is. If it holds only text, `007` and `true` are texts.

    Raises:
        ValueError: a quote or a bracket has no end, or there are several values. The message continues a
            sentence that begins with the text.
    """
    text = text.strip()
    holds_text = key is not None and key.types == (str,)
    if holds_text and text.lower() == "null" and not (key is not None and key.nullable):
        return text
    parsed = parse(text)
    if parsed is None:
        return _read_outside_grammar(text, holds_text)
    if parsed.is_sweep_override():
        raise ValueError(_SWEEP)
    value = parsed.value()
    return text if holds_text and not isinstance(value, str | None) else value


@lru_cache(maxsize=10_000)
def parse(text: str) -> Override | None:
    """Return a value as Hydra's parser reads it, as an override of some key; None if it can't be read."""
    from hydra.errors import HydraException

    try:
        return _parser().parse_override(f"key={text}")
    except HydraException:
        return None


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _read_outside_grammar(text: str, holds_text: bool) -> Any:
    if text[:1] in ("'", '"'):
        raise ValueError(_SWEEP if "," in text else _NO_END)
    if text[:1] in ("[", "{") and not holds_text:
        from omegaconf import OmegaConf

        try:
            return OmegaConf.to_container(OmegaConf.create(text))
        except yaml.YAMLError:
            raise ValueError(_NO_END) from None
    if "," in re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", text):  # a comma outside of brackets
        raise ValueError(_SWEEP)
    return text
