"""The weights of a Hugging Face folder: what is there, by its headers, and the tensors one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.workers.rollout.base import checked_weights

Shapes = dict[str, tuple[int, ...]]


def shapes_in(folder: Path) -> Shapes:
    """Name -> shape. ValueError: there is no folder, no *.safetensors in it, or one that can't be read."""
    shapes: Shapes = {}
    path = folder  # its name may be too long, or it can't be looked into
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not shapes:
        raise ValueError(f"{folder} is no folder with *.safetensors")
    return shapes


def check_same(shapes: Shapes, expected: Shapes) -> None:
    """ValueError: they are not the weights of the same model. A head that is not expected may be there."""
    empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
    for _ in checked_weights(empty, expected):
        pass


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
