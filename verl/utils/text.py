"""Texts of others: what a terminal, a file, a tokenizer and an error message take of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Control characters without tab and newline, marks that change the direction of writing, and halves of
# surrogate pairs. A terminal takes some of them as commands: to rename its window, to write the clipboard.
_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_TEXT_PARTS = ("text", "input_text", "output_text")  # OpenAI's names
# A list or a struct as Python, numpy or JSON print it, told by its quotation marks.
_PRINTED = re.compile(
    r"""\[[\s\[({]*['"].*\]|\{[\s\[({]*['"].*\}|\(\s*(['"]).*\1\s*,?\s*\)|array\(.*\)|\[(null|None|\[).*\]""",
    re.DOTALL,
)


def printable(value: object) -> str:
    """Return a text in which nothing is a command to a terminal: such characters become escapes (`\\x1b`)."""
    return _NOT_SHOWN.sub(lambda match: ascii(match.group())[1:-1], str(value))


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode.

    Half of a surrogate pair becomes U+FFFD. JSON can spell it ("\\ud83d"), and no tokenizer and no file takes
    it.
    """
    if is_encodable(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def encodable_json(value: Any) -> Any:
    """Return JSON's data with `encodable` texts, keys included."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable_json(key): encodable_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable_json(item) for item in value]
    return value


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text: it has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short_repr(value: Any) -> str:
    """Return a value as it appears in an error message."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def is_printed_list(text: str) -> bool:
    """Return whether a text is a list or a struct as a program prints it, such as "['a', 'b']"."""
    stripped = text.strip()
    return stripped[:1] in ("[", "{", "(", "a") and _PRINTED.fullmatch(stripped) is not None


def joined_parts(content: Any) -> Any:
    """Return the text of a content that is a list of text parts, and any other content as it is."""
    if isinstance(content, str):
        return content
    is_array = getattr(content, "ndim", 0) == 1  # tables hand over lists as numpy's arrays
    if not (is_array or isinstance(content, list | tuple)) or len(content) == 0:
        return content
    texts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            return content
        texts.append(part["text"])
    return "".join(texts)


def format_bytes(size: float) -> str:
    """Return a size for people: "3.2 GB" (10^9 bytes)."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
