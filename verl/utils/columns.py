"""What DataProto does with single columns and meta_info entries: compare, join, make ready for the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Deep equality that understands arrays, tensors and containers of them; NaN equals NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        exact = not a.is_floating_point()
        return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def joined_column(key: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts of a tensor column; ValueError if they differ in width."""
    shapes = [tuple(part.shape) for part in parts]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(f"tensor {key!r} has shapes {shapes}; all but the first dimension must agree")
    return torch.cat(parts, dim=0)


def merged_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One meta_info of several parts; see `DataProto.concat`."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key != "metrics" and key in merged and not same(merged[key], value):
                raise ValueError(
                    f"meta_info[{key!r}] differs between the parts: {merged[key]!r} and {value!r}; "
                    'put figures of single parts into meta_info["metrics"]'
                )
            merged[key] = value
    metrics = [part["metrics"] for part in parts if "metrics" in part]
    names = {name: None for figures in metrics for name in figures}  # in the order they were first met
    if len(metrics) > 1:
        merged["metrics"] = {name: _merge_figures([m[name] for m in metrics if name in m]) for name in names}
    return merged


def _merge_figures(figures: list[Any]) -> Any:
    if all(isinstance(figure, list) for figure in figures):
        return [entry for figure in figures for entry in figure]
    return sum(figures) / len(figures)


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
