"""What DataProto does with single columns and meta_info entries: compare, join, make ready for the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class BatchError(ValueError, AssertionError):
    """Batches that don't go together. verl's callers catch it as an AssertionError."""


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """An object array with one entry per value: rows that are lists of equal length stay lists.

    An object array stays as it is, also one with more dimensions (`fold_batch_dim` makes those).
    """
    if not isinstance(values, list | tuple | np.ndarray):
        raise ValueError(
            f"a column is a tensor, a numpy array or a list of one value per row, got {values!r:.80}"
        )
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim:
        return values
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        array[row] = value
    return array


def same(a: Any, b: Any, under_way: tuple[tuple[int, int], ...] = ()) -> bool:
    """Deep equality that understands arrays, tensors and containers of them; NaN equals NaN.

    `under_way`: pairs that are being compared, so that an array that holds itself comes to an end.
    """
    pair = (id(a), id(b))
    if a is b or pair in under_way:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        exact = not a.is_floating_point()
        return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, np.ndarray):
        entries = zip(a.ravel().tolist(), b.ravel().tolist(), strict=False)
        return a.shape == b.shape and all(same(x, y, (*under_way, pair)) for x, y in entries)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], (*under_way, pair)) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, (*under_way, pair)) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def merged_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One meta_info of several parts; see `DataProto.concat`."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key != "metrics" and key in merged and not same(merged[key], value):
                raise BatchError(
                    f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}; put what "
                    'differs between the parts into meta_info["metrics"]'
                )
            merged[key] = value
    metrics = [part["metrics"] for part in parts if "metrics" in part]
    if any(isinstance(entry, list) for entry in metrics):  # as verl's workers write them: [{"loss": 0.5}]
        rows = [row for entry in metrics for row in (entry if isinstance(entry, list) else [entry])]
        merged["metrics"] = list_of_dict_to_dict_of_list(rows)
    elif len(metrics) > 1:
        merged["metrics"] = {
            name: sum(values, []) if isinstance(values[0], list) else sum(values) / len(values)
            for name, values in list_of_dict_to_dict_of_list(metrics).items()
        }
    return merged


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """[{"a": 1}, {"a": 2}] -> {"a": [1, 2]}; names in the order in which they come."""
    columns: dict[str, list[Any]] = {}
    for entry in list_of_dict:
        for key, value in entry.items():
            columns.setdefault(key, []).append(value)
    return columns


def to_array(key: str, tensor: Any) -> tuple[np.ndarray, torch.dtype]:
    """A tensor column as numpy array, of its own type or of equally wide integers, and its type."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"batch[{key!r}] is a {type(tensor).__name__}; only flat tensor columns can be shipped"
        )
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):  # numpy has no such types
        bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8
        return tensor.view(bits).numpy(), tensor.dtype
    return tensor.numpy(), tensor.dtype


def from_array(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Copies arrays that are read-only views of Ray's shared memory, so that tensors are writable."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype)
