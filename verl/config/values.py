"""Values as a command line has them: null, true, 1e-6, text, 'quoted text', [lists], {name: value}."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class UnreadableValue(ValueError):
    """Its text goes on after the argument that it is about."""


def parse_value(text: str, *, only_text: bool = False, nullable: bool = True) -> Any:
    """The value that `text` stands for. only_text: what is not in quotes is taken as it stands, but for null.

    Raises:
        UnreadableValue: a quote or a bracket has no end, or several values are there.
    """
    text = text.strip()
    reader = _Reader(text)
    if not text:
        return ""
    if only_text and text[0] not in "'\"":
        if _has_comma(text):
            raise UnreadableValue(", a sweep; expected one value. A list is written key=[a,b].")
        return None if nullable and text.lower() == "null" else text
    value = reader.value(end="")
    rest = reader.rest()
    if rest.startswith(","):
        raise UnreadableValue(", a sweep; expected one value. A list is written key=[a,b].")
    if rest:
        raise UnreadableValue(
            f", where {rest!r} follows a value; put a value with special characters in quotes that reach the "
            "program, for example key='\"...\"'."
        )
    return value


def read_number(text: str) -> Any:
    """A number, if the text is one; else the text."""
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)


def _has_comma(text: str) -> bool:
    """Outside of brackets."""
    return "," in re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", text)


class _Reader:
    """Reads one value after the other from a text."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def rest(self) -> str:
        return self.text[self.place :].lstrip()

    def value(self, end: str) -> Any:
        """The next value; a bare one goes up to a comma or to one of the letters in `end`."""
        self._skip_spaces()
        letter = self.text[self.place : self.place + 1]
        if letter and letter in "'\"":
            return self._quoted(letter)
        if letter == "[":
            return self._list()
        if letter == "{":
            return self._dictionary()
        start = self.place
        while self.place < len(self.text) and self.text[self.place] not in "," + end:
            self.place += 1
        return _scalar(self.text[start : self.place].strip())

    def _skip_spaces(self) -> None:
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1

    def _quoted(self, quote: str) -> str:
        end = self.place + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise UnreadableValue(f", where a quote {quote} has no end.")
        inner, self.place = self.text[self.place + 1 : end], end + 1
        return _ESCAPED.sub(lambda m: m[1] if m[1] in "'\"\\" else m[0], inner)

    def _list(self) -> list[Any]:
        items: list[Any] = []
        for _ in self._items("]"):
            items.append(self.value(end="]"))
        return items

    def _dictionary(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for _ in self._items("}"):
            name = self.value(end=":}")
            if self.rest()[:1] != ":":
                raise UnreadableValue(", where a dictionary lacks a colon; expected {name: value}.")
            self.place = self.text.index(":", self.place) + 1
            items[str(name)] = self.value(end="}")
        return items

    def _items(self, closing: str) -> Any:
        """Stops before each item; passes over the commas between them and the closing bracket."""
        self.place += 1
        while True:
            self._skip_spaces()
            if self.place >= len(self.text):
                raise UnreadableValue(f", where a bracket lacks its {closing}.")
            if self.text[self.place] == closing:
                self.place += 1
                return
            if self.text[self.place] == ",":
                self.place += 1
                continue
            yield


def _scalar(text: str) -> Any:
    words = {"null": None, "true": True, "false": False}
    return words[text.lower()] if text.lower() in words else read_number(text)
