"""Values as a command line and yaml files have them: null, true, 1e-6, text, 'in quotes', [lists], {a: b}."""

from __future__ import annotations

import re
from typing import Any

import yaml

_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_NO_END = (
    ", where a quote or a bracket has no end, or something follows a value; put a value with special "
    "characters in quotes that reach the program, for example key='\"...\"'."
)
_SWEEP = ", a sweep; expected one value. A list is written key=[a,b]."


class YamlLoader(yaml.SafeLoader):
    """A loader that reads 1e-6 as a number, which yaml 1.1 takes for text."""


YamlLoader.add_constructor(
    "tag:yaml.org,2002:str",
    lambda loader, node: read_number(node.value) if node.style is None else node.value,
)


def parse_value(text: str, *, is_text: bool = False, nullable: bool = True) -> Any:
    """Return the value that `text` stands for.

    Args:
        text: the text.
        is_text: whether the key holds only text. Then only quotes and null have a meaning.
        nullable: whether null is a value of the key.

    Raises:
        ValueError: a quote or a bracket has no end, or there are several values. The message continues a
            sentence that begins with the text.
    """
    text = text.strip()
    if text[:1] in ("'", '"'):
        quoted = re.fullmatch(r"(['\"])((?:\\.|(?!\1).)*)\1", text, re.DOTALL)
        if quoted is not None:
            return re.sub(r"\\(['\"\\])", r"\1", quoted[2])
        raise ValueError(_SWEEP if "," in text else _NO_END)
    if text[:1] in ("[", "{") and not is_text:
        if text[0] == "{":  # {a:1} is allowed too
            text = re.sub(r"([{,]\s*[\w.]+):(?=[^\s/])", r"\1: ", text)
        try:
            return yaml.load(text, YamlLoader)  # noqa: S506
        except yaml.YAMLError:
            raise ValueError(_NO_END) from None
    if "," in re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", text):  # a comma outside of brackets
        raise ValueError(_SWEEP)
    words = {"null": None} if is_text else {"null": None, "true": True, "false": False}
    if text.lower() in words and (nullable or text.lower() != "null" or not is_text):
        return words[text.lower()]
    return text if is_text else read_number(text)


def read_number(text: str) -> Any:
    """Return a number if the text is one, else the text."""
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
