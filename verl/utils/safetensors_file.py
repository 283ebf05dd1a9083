"""Safetensors files that are written and read one tensor at a time, while other threads go on.

The format (https://github.com/huggingface/safetensors) has eight bytes with the header's length, the header
(JSON: name -> dtype, shape, offsets of its bytes), and the tensors' bytes end to end. The library's own
`save_file` wants all tensors of a file at once, and no other thread of the process runs while it writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
INDEX_FILE = "model.safetensors.index.json"


def write_safetensors(file: Path, like: Mapping[str, Tensor], stream: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors of `stream` (on CPU) to a file.

    Args:
        file: the file to write.
        like: name -> a tensor of that shape and dtype. Its values don't matter (it may be on the device
            "meta").
        stream: (name, tensor) in the order of `like`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in like.items():
        start = end
        end = end + tensor.nbytes
        offsets = {"data_offsets": [start, end]}
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), **offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with file.open("wb", buffering=0) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for (name, tensor), expected in zip(stream, like, strict=True):
            assert name == expected and tensor.dtype == like[name].dtype and tensor.shape == like[name].shape
            remaining: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            while remaining:
                remaining = remaining[out.write(remaining) :]


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the model of a folder: those of its index, if it has one, or all.

    Raises ValueError if the index can't be read, names a file that is missing or outside of the folder, or if
    a model.safetensors lies beside files of an index: two models would be in one folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} can't be read ({type(error).__name__}: {error})") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{index} names {name}, which is missing; copy the model again.")
    single = folder / "model.safetensors"
    if single.is_file() and single.name not in names:
        raise ValueError(
            f"Found {single} beside {INDEX_FILE}, which names other files; expected one model in the folder. "
            "Remove the one that is not meant."
        )
    return [folder / name for name in names]


def shapes_in(folder: Path) -> Shapes:
    """Return the shape of each tensor in a folder's files, read from their headers.

    Raises ValueError if there is no folder, no *.safetensors in it, or a file that can't be read.
    """
    return {name: shape for name, (_, shape) in dtypes_and_shapes_in(folder).items()}


def dtypes_and_shapes_in(folder: Path) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
    """Return the dtype (None for one that this module does not write) and the shape of each tensor.

    Raises ValueError as `shapes_in` does.
    """
    facts: dict[str, tuple[torch.dtype | None, tuple[int, ...]]] = {}
    path = folder  # the error may be of the folder: its name is too long, or it can't be looked into
    try:
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    view = file.get_slice(name)
                    facts[name] = (_DTYPES.get(view.get_dtype()), tuple(view.get_shape()))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not facts:
        raise ValueError(f"{folder} is no folder with *.safetensors")
    return facts


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the files of a folder's model."""
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
