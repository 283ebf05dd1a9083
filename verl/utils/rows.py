"""Columns of a row that several rooms read."""

import json
from collections.abc import Mapping
from typing import Any


def row_max_turns(row: Mapping[str, Any]) -> int | None:
    """Return `max_turns` of a row or of its extra_info, or None if neither has it.

    Raises ValueError if the value is not a whole number.
    """
    for columns in (row, row.get("extra_info")):
        value = columns.get("max_turns") if isinstance(columns, dict | Mapping) else None
        is_nan = isinstance(value, float) and value != value  # pandas writes it for an empty cell
        if value is not None and not is_nan:
            try:
                number = -1 if isinstance(value, bool | bytes) else int(value)
            except (TypeError, ValueError, OverflowError):
                number = -1
            if number < 0 or (isinstance(value, float) and number != value):
                raise ValueError(f"Found max_turns={value!r:.60} in a row; expected a whole number.")
            return number
    return None


def truth_struct(ground_truth: Any) -> Mapping[str, Any] | None:
    """Return the struct of golden answers or verifiers that a row's `ground_truth` is, or None if it is none.

    JSON text of such a struct counts as the struct.
    """
    if isinstance(ground_truth, dict | Mapping):  # `dict` is checked first because that is fast
        return ground_truth
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith("{"):
        return None
    try:
        struct = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return None
    is_struct = isinstance(struct, dict) and not {"target", "verifiers"}.isdisjoint(struct)
    return struct if is_struct else None
