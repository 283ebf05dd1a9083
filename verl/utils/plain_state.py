"""Nested plain values in one file that can be read without running anything: JSON and arrays in an npz.

    values -> save_plain -> file.npz: `json` (the tree), `data` (the arrays' bytes) -> load_plain -> values

Values are None, bool, int, float, str, bytes, lists, tuples, sets, dictionaries, dates, numbers of numpy, and
arrays of numpy and torch. They come back with their types; subclasses of str, list and dict come back as str,
list and dict. A pickle would hold everything, and would run everything.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.utils.columns import from_array, to_array

TAG = "$"  # the key of a JSON object that stands for something else than a dictionary with names
_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def encode(self, value: Any, name: str) -> Any:
        """Return a value as JSON has it; `name` says for messages where it stands."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, np.generic) and not isinstance(value, np.str_ | np.bytes_):
            return {TAG: "scalar", "of": self._array(np.asarray(value), name)}
        if isinstance(value, str):
            return str(value)
        if isinstance(value, bytes):
            return {TAG: "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            array, dtype = to_array(name, value)
            return {TAG: "tensor", "dtype": str(dtype).removeprefix("torch."), "of": self._array(array, name)}
        if isinstance(value, np.ndarray):
            return self._array(value, name)
        if isinstance(value, Mapping):
            if all(type(key) is str for key in value) and TAG not in value:
                return {key: self.encode(item, f"{name}.{key}") for key, item in value.items()}
            pairs = [
                [self.encode(key, name), self.encode(item, f"{name}.{key}")] for key, item in value.items()
            ]
            return {TAG: "dict", "of": pairs}
        if isinstance(value, tuple | set | frozenset):
            tag = next(other for other in (tuple, set, frozenset) if isinstance(value, other)).__name__
            return {TAG: tag, "of": [self.encode(item, name) for item in value]}
        if isinstance(value, list):
            return [self.encode(item, name) for item in value]
        if kind.__name__ in _TIMES:
            return {TAG: kind.__name__, "of": value.isoformat()}
        if isinstance(value, datetime.timedelta):
            return {TAG: "timedelta", "of": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, decimal.Decimal):
            return {TAG: "decimal", "of": str(value)}
        raise TypeError(f"{name} holds a {kind.__module__}.{kind.__qualname__}; expected plain data")

    def _array(self, array: np.ndarray, name: str) -> dict[str, Any]:
        if array.dtype.hasobject:
            items = [self.encode(item, name) for item in array.ravel().tolist()]
            return {TAG: "objects", "shape": array.shape, "of": items}
        start = len(self.data)
        self.data += np.ascontiguousarray(array).tobytes()
        return {TAG: "array", "dtype": array.dtype.str, "shape": array.shape, "at": start}


class _Reader:
    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        tag = value[TAG]
        if tag == "array":
            return self._array(value)
        content = value["of"]
        if tag == "objects":
            array = np.empty(len(content), dtype=object)
            for position, item in enumerate(content):
                array[position] = self.decode(item)
            return array.reshape(value["shape"])
        if tag == "scalar":
            return self.decode(content)[()]
        if tag == "tensor":
            dtype = getattr(torch, value["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{value['dtype']} is no type of tensors")
            return from_array(self._array(content), dtype)
        if tag == "bytes":
            return base64.b64decode(content)
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag in ("tuple", "set", "frozenset"):
            kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
            return kinds[tag](self.decode(item) for item in content)
        if tag in _TIMES:
            return _TIMES[tag].fromisoformat(content)
        if tag == "timedelta":
            return datetime.timedelta(*content)
        if tag == "decimal":
            return decimal.Decimal(content)
        raise ValueError(f"{tag!r} is no kind of value")

    def _array(self, entry: dict[str, Any]) -> np.ndarray:
        dtype = np.dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        start = entry["at"]
        raw = self.data[start : start + count * dtype.itemsize].tobytes()
        return np.frombuffer(raw, dtype, count).reshape(entry["shape"]).copy()


def save_plain(path: Path, state: Any) -> None:
    """Write nested plain values into a file.

    Raises TypeError, with the place of the value, if one of them is not plain.
    """
    writer = _Writer()
    tree = json.dumps(writer.encode(state, path.stem)).encode()
    arrays = {
        "json": np.frombuffer(tree, np.uint8),
        "data": np.frombuffer(bytes(writer.data), np.uint8),
    }
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_plain(path: Path) -> Any:
    """Return what `save_plain` wrote.

    Raises ValueError if the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return _Reader(stored["data"]).decode(json.loads(stored["json"].tobytes()))
    except Exception as error:  # a damaged file raises errors of all kinds
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error})") from error
