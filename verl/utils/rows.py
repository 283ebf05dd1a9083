"""Columns of a row that several rooms read."""

from collections.abc import Mapping
from typing import Any


def row_max_turns(row: Mapping[str, Any]) -> int | None:
    """Return `max_turns` of a row or of its extra_info, or None if neither has it.

    Raises ValueError if the value is not a whole number.
    """
    for columns in (row, row.get("extra_info")):
        value = columns.get("max_turns") if isinstance(columns, Mapping) else None
        if value is not None and value == value:  # not the NaN of an empty cell
            try:
                number = int(value)
            except (TypeError, ValueError):
                number = -1
            if number < 0 or (isinstance(value, float) and number != value):
                raise ValueError(f"Found max_turns={value!r} in a row; expected a whole number.")
            return number
    return None
