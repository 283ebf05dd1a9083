"""Files of a run: JSON written whole or not at all, and the lines of metrics."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.text import encodable


def write_text_atomically(path: Path, text: str) -> None:
    """Write to a file aside and rename it, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def to_jsonable(value: Any) -> Any:
    """Return a value that JSON can hold.

    Arrays become lists, numpy numbers python's, nan and infinity null.
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | np.ndarray):
        return [to_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        return to_jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return the JSON of `to_jsonable(value)`, with non-ASCII letters as they are.

    What UTF-8 can't encode becomes U+FFFD.
    """
    return encodable(json.dumps(to_jsonable(value), ensure_ascii=False, indent=indent))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one a line; a last line that a kill left half written is skipped.

    Lines end only at "\\n", because a text may hold other letters that end lines, such as U+2028.
    """
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, whole or not at all."""
    write_text_atomically(path, "".join(to_json(row) + "\n" for row in rows))


def append_whole(path: Path, text: str) -> None:
    """Add text to a file; if it can't be written to its end, the file is what it was before.

    Raises OSError, with the file's name, if it can't be written.
    """
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        remaining = memoryview(text.encode("utf-8", errors="replace"))
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError as error:
            with suppress(OSError):  # the first error is the one that counts
                file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from error


class MetricsFile:
    """The file `metrics.jsonl`: {"step": int, name: float, ...} per line, steps ascending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut_after(self, step: int) -> None:
        """Drop the lines of later steps, because a resumed run writes those again; -1 drops all."""
        if self.path.is_file():
            write_lines(self.path, (row for row in self.read() if row["step"] <= step))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one step's line, whole or not at all; it is on its way to the disk when this returns.

        Raises OSError if it can't be written, for example because the disk is full.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_whole(self.path, to_json({"step": step, **metrics}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines."""
        return read_lines(self.path)


def last_steps(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the lines that have the metric."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
