"""Keys and values of all slots: one contiguous buffer [slots, KV heads, length, head size] per layer.

A slot is one row of the buffer and belongs to one session. The length axis starts short and doubles up to
max_model_len as sessions get longer, so memory follows what is used; the number of slots is bounded so that
the buffers fit the byte budget at full length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.workers.rollout.native.architecture import ModelSpec

_FIRST_LENGTH = 256


class KVCache:
    """The buffers, lazily made and grown.

    Attributes:
        num_slots: rows; the number asked for, or fewer if the budget says so.
        length: present size of the length axis (0 before first use).
        keys, values: one tensor [num_slots, num_kv_heads, length, head_dim] per layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int | None = None,
    ) -> None:
        """ValueError if not even one slot of max_model_len positions fits the budget."""
        per_position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        per_slot = per_position * max_model_len
        if budget_bytes is not None and budget_bytes < per_slot:
            raise ValueError(
                f"kv_budget_bytes is {budget_bytes:,}, but one sequence of max_model_len={max_model_len} "
                f"needs {per_slot:,}; raise the budget or lower max_model_len"
            )
        self.num_slots = num_slots if budget_bytes is None else min(num_slots, budget_bytes // per_slot)
        self.max_model_len = max_model_len
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._bytes_per_position = per_position
        self._num_layers = spec.num_layers
        self._shape = (self.num_slots, spec.num_kv_heads, spec.head_dim)
        self._dtype = dtype
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes_per_position * self.num_slots * self.length

    def ensure(self, length: int) -> None:
        """Make room for positions 0..length-1 in every slot; what is stored stays."""
        if length <= self.length:
            return
        new_length = max(_FIRST_LENGTH, self.length)
        while new_length < length:
            new_length *= 2
        new_length = min(new_length, self.max_model_len)
        self.keys = [self._grown(self.keys, layer, new_length) for layer in range(self._num_layers)]
        self.values = [self._grown(self.values, layer, new_length) for layer in range(self._num_layers)]
        self.length = new_length

    def release(self) -> None:
        """Give the memory back; the next `ensure` makes new buffers."""
        self.keys, self.values, self.length = [], [], 0

    def _grown(self, buffers: list[Tensor], layer: int, new_length: int) -> Tensor:
        # Zeros, not empty memory: masked positions get weight 0, and 0 * NaN would be NaN.
        slots, kv_heads, head_dim = self._shape
        grown = torch.zeros(slots, kv_heads, new_length, head_dim, dtype=self._dtype, device=self._device)
        if buffers:
            grown[:, :, : self.length] = buffers[layer]
            buffers[layer] = buffers[layer].new_empty(0)  # so that at most one layer is held twice
        return grown
