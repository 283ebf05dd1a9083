"""Writing safetensors files one tensor at a time, while other threads go on.

The format (https://github.com/huggingface/safetensors): eight bytes with the header's length, the header
(JSON: name -> dtype, shape, place of its bytes), the tensors' bytes end to end. The library's own `save_file`
wants all tensors of a file at once, and no other thread of the process runs while it writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

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
    """Writes the tensors of `stream` (on CPU), which come in the order of `like`: name -> a tensor of that
    shape and dtype, whose values don't matter (it may be on the device "meta").
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in like.items():
        start, end = end, end + tensor.nbytes
        places = {"data_offsets": [start, end]}
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), **places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with file.open("wb", buffering=0) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for (name, tensor), expected in zip(stream, like, strict=True):
            assert name == expected and tensor.dtype == like[name].dtype and tensor.shape == like[name].shape
            left: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            while left:
                left = left[out.write(left) :]
