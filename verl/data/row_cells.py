"""Cells of rows: chat messages, structs and what else a column holds, however a file has written them.

    a cell (list, struct, numpy array, tuple, JSON text, null, ...) -> a plain value, or CellError

Tables force all rows of a column into one struct, so that a row gets nulls for fields that it never had
(`without_nulls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.utils.text import is_encodable, joined_parts, short_repr

Row = dict[str, Any]

# How Python or numpy print a list of messages.
_LITERAL_MESSAGES = re.compile(r"[\[{(\s]*(array\()?[\[{(\s]*'(role|content)'\s*:")


class CellError(ValueError):
    """An error in one cell of a row.

    Attributes:
        column: the name of the column.
    """

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column

    def __reduce__(self) -> tuple[type[CellError], tuple[str, str]]:
        return CellError, (self.column, str(self))


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: null, or the NaN that pandas writes for null."""
    return value is None or (isinstance(value, float) and value != value)


def without_nulls(value: Any) -> Any:
    """Return a value without the entries of its structs that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def parsed_text(value: Any, opening: str) -> Any:
    """Return what a JSON text holds if it begins with `opening`, and any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def struct_cell(value: Any, column: str) -> dict[str, Any] | None:
    """Return a cell that holds a struct, or JSON text of one; None if the cell is empty.

    Raises CellError if the cell holds something else.
    """
    if isinstance(value, dict):  # the usual case, and the fastest check
        return dict(value)
    if is_missing(value):
        return None
    struct = parsed_text(value, "{")
    if not isinstance(struct, Mapping):
        raise CellError(column, f"found {short_repr(value)}; expected a struct, or JSON text of one")
    return dict(struct)


def text_cell(value: Any, column: str) -> str | None:
    """Return a cell that holds text; None if the cell is empty.

    Raises CellError if the cell holds something else, or text that UTF-8 can't encode.
    """
    if is_missing(value) or value == "":
        return None
    if not isinstance(value, str):
        raise CellError(column, f"found {short_repr(value)}; expected text")
    if not is_encodable(value):
        raise CellError(column, f"found {short_repr(value)}, half of a letter; expected whole letters")
    return value


def reward_cell(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the struct of a row's `reward_model`, or else of its `reward_spec`.

    The struct has the entry `ground_truth`, which may be None. The result is None if both cells are empty.

    Raises CellError if the cell holds no struct.
    """
    for column in ("reward_model", "reward_spec"):
        reward = struct_cell(row.get(column), column)
        if reward is not None:
            reward.setdefault("ground_truth", None)
            return column, reward
    return None


def chat_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Return a cell as chat messages, without their entries that are null.

    Plain text is one user message. JSON text of messages is read as messages. The text parts of a content
    are joined.

    Raises CellError if the cell is neither text nor chat messages.
    """
    cell = messages_in_text(value, column) if isinstance(value, str) else value
    if isinstance(cell, str):
        text = text_cell(cell, column)
        return [_chat_message({"role": "user", "content": text or ""}, 0, column)]
    is_list = isinstance(cell, list | tuple) or (isinstance(cell, np.ndarray) and cell.ndim > 0)
    if not is_list or len(cell) == 0:
        raise CellError(column, f"{column} holds {short_repr(value)}; expected text or chat messages")
    return [_chat_message(message, i, column) for i, message in enumerate(cell)]


def messages_in_text(text: str, column: str) -> Any:
    """Return the messages that a JSON text holds, and any other text as it is.

    Raises CellError if the text is a list of structs as Python prints it.
    """
    stripped = text.strip()
    if not (stripped.startswith(("[", "{")) and stripped.endswith(("]", "}"))):
        return text
    parsed = parsed_text(text, stripped[0])
    if isinstance(parsed, dict) and {"role", "content"} <= parsed.keys():
        return [parsed]
    if isinstance(parsed, list) and any(isinstance(message, dict) for message in parsed):
        return parsed
    if parsed is text and _LITERAL_MESSAGES.match(stripped):
        raise CellError(
            column,
            f"{column} holds {short_repr(text)}, a list as Python prints it; expected a list of messages, or "
            "JSON text of one",
        )
    return text


def _chat_message(message: Any, index: int, column: str) -> dict[str, Any]:
    """Return one message of a cell. Raises CellError if it is none."""
    name = f"message {index} of {column}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise CellError(column, f"{name} is {short_repr(message)}; expected {{role, content}}")
    entries = {key: item for key, item in message.items() if item is not None}
    content = joined_parts(entries.get("content"))
    if not isinstance(content, str) and not (content is None and entries.get("tool_calls")):
        raise CellError(
            column,
            f"{name} has the content {short_repr(message.get('content'))}; expected text or a list of text "
            "parts",
        )
    if isinstance(content, str):
        if not is_encodable(content):
            raise CellError(
                column,
                f"{name} has the content {short_repr(content)}, half of a letter; expected whole ones",
            )
        entries["content"] = content
    return entries
