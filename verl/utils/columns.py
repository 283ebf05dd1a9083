"""Operations of DataProto on single columns and meta_info entries: compare, join, prepare for the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class BatchError(ValueError, AssertionError):
    """An error for batches that don't go together. verl's callers catch it as an AssertionError."""


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return an object array with one entry per value: rows that are lists of equal length stay lists.

    An object array is returned as it is, also if it has more dimensions (`fold_batch_dim` makes such arrays).
    Raises ValueError if `values` is no list, tuple or array.
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


def deep_equal(a: Any, b: Any, in_progress: tuple[tuple[int, int], ...] = ()) -> bool:
    """Compare deeply arrays, tensors and containers of them; NaN equals NaN.

    `in_progress` holds the pairs that are being compared, so that the comparison of an array that holds
    itself ends.
    """
    pair = (id(a), id(b))
    if a is b or pair in in_progress:
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
        return a.shape == b.shape and all(deep_equal(x, y, (*in_progress, pair)) for x, y in entries)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key], (*in_progress, pair)) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(
            deep_equal(x, y, (*in_progress, pair)) for x, y in zip(a, b, strict=True)
        )
    return bool(a == b or (a != a and b != b))


def merged_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of several parts into one; see `DataProto.concat`.

    Raises BatchError if two parts have different values for a key.
    """
    merged: dict[str, Any] = {}
    for meta_info in parts:
        for key, value in meta_info.items():
            if key != "metrics" and key in merged and not deep_equal(merged[key], value):
                raise BatchError(
                    f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}; put what "
                    'differs between the parts into meta_info["metrics"]'
                )
            merged[key] = value
    metrics = [meta_info["metrics"] for meta_info in parts if "metrics" in meta_info]
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
    """Turn [{"a": 1}, {"a": 2}] into {"a": [1, 2]}; names keep the order in which they come."""
    columns: dict[str, list[Any]] = {}
    for entry in list_of_dict:
        for key, value in entry.items():
            columns.setdefault(key, []).append(value)
    return columns


def to_array(key: str, tensor: Any) -> tuple[np.ndarray, torch.dtype]:
    """Return a tensor column as a numpy array, and the tensor's type.

    The array has the tensor's own type, or that of equally wide integers where numpy does not have it. Raises
    ValueError if the column is no tensor.
    """
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
    """Return a tensor of type `dtype` on the array's memory.

    An array that is a read-only view of Ray's shared memory is copied, so that the tensor is writable.
    """
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype)
