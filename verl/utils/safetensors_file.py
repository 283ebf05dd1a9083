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


def shapes_in(folder: Path) -> Shapes:
    """Return the shape of each tensor in a folder's files, read from their headers.

    Raises ValueError if there is no folder, no *.safetensors in it, or a file that can't be read.
    """
    shapes: Shapes = {}
    path = folder  # the error may be of the folder: its name is too long, or it can't be looked into
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not shapes:
        raise ValueError(f"{folder} is no folder with *.safetensors")
    return shapes


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all *.safetensors of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
