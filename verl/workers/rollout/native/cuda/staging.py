"""Many small arrays to the device in one copy: a step's numbers, packed into one pinned buffer.

    numpy arrays -> [pinned bytes, host] -- one copy, no waiting --> [bytes, device] -> tensor views

`upload` is for arrays whose shapes change from step to step. `Staging` keeps both buffers: its tensors stay
where they are, as a CUDA graph needs it, and each step writes its numbers into the `host` views.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; of every array in the buffer
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
_TORCH |= {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


class Staging:
    """Named arrays of fixed shape, as numpy views to fill (`host`) and as device tensors (`device`).

    The caller must not write into `host` while an `upload` may still be under way: a step that reads its
    results back has waited for it.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]], device: torch.device) -> None:
        """arrays: shape and dtype by name, int32, int64, float32 or float64."""
        starts, size = {}, 0
        for name, (shape, dtype) in arrays.items():
            starts[name] = size
            num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._from = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._to = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in arrays.items():
            part = slice(starts[name], starts[name] + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            self.host[name] = self._from[part].numpy().view(dtype).reshape(shape)
            self.device[name] = self._to[part].view(_TORCH[dtype]).view(shape)

    def upload(self) -> None:
        """Start the copy to the device; what is put on the same stream afterwards sees the new numbers."""
        self._to.copy_(self._from, non_blocking=True)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays (int32, int64, float32 or float64) on the device, in one copy that nobody waits for."""
    staging = Staging({name: (array.shape, array.dtype) for name, array in arrays.items()}, device)
    for name, array in arrays.items():
        staging.host[name][...] = array
    staging.upload()
    return staging.device
