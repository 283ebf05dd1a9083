"""How new tokens attend to the paged pools: the protocol, and the reference that runs on any device.

The kernels that are meant to be fast are `cpu_kernel.attend` and those in `cuda/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.step_batch import StepBatch

_MAX_SCORES = 1 << 24  # of `masked_attention`, which holds four tensors of so many float32


class AttentionBackend(Protocol):
    """How new tokens attend to the paged pools on one kind of device."""

    def plan(self, batch: StepBatch) -> Any:
        """What `attend` needs to know of a step, on the device; once per step, shared by all layers."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        """Causal attention of T new tokens, those in the pools before them included.

        Args:
            query: [T, num_heads, head_dim], rotated.
            key, value: [T, num_kv_heads, head_dim] of the new tokens, the keys rotated.
            keys, values: the layer's pools [num_blocks, block_size, num_kv_heads, head_dim], which hold the
                new tokens already.
            window: positions that a token sees, itself included (None = all).
            softcap: scores become softcap * tanh(scores / softcap) (None = they stay).
            scale: of the scores.

        Returns:
            [T, num_heads * head_dim]
        """


@dataclass(frozen=True)
class TorchPlan:
    """places: int64 [D, L], where each decoding sequence's positions are in the flat pool; lengths: int64
    [D]; spans: (first row, count, start, places int64 [start + count]) of each prefill span."""

    places: Tensor
    lengths: Tensor
    spans: list[tuple[int, int, int, Tensor]]


class TorchAttention:
    """`AttentionBackend` in plain torch on any device: gathers keys and values, pads decode rows."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def plan(self, batch: StepBatch) -> TorchPlan:
        longest = int(batch.decode_lengths.max()) if batch.num_decode else 0
        decode = (
            np.stack([self._places(table, longest) for table in batch.decode_tables]) if longest else None
        )
        return TorchPlan(
            places=_to(np.zeros((0, 0), np.int64) if decode is None else decode, self._device),
            lengths=_to(batch.decode_lengths, self._device),
            spans=[
                (
                    span.first,
                    span.count,
                    span.start,
                    _to(self._places(span.table, span.start + span.count), self._device),
                )
                for span in batch.spans
            ],
        )

    def _places(self, table: np.ndarray, length: int) -> np.ndarray:
        positions = np.arange(length)
        return (
            table[positions // self._block_size].astype(np.int64) * self._block_size
            + positions % self._block_size
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: TorchPlan,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        parts = []
        num_decode = len(plan.lengths)
        if num_decode:
            starts = plan.lengths - 1
            parts.append(
                masked_attention(
                    query[:num_decode, None],
                    flat_keys[plan.places],
                    flat_values[plan.places],
                    starts[:, None],
                    window,
                    softcap,
                    scale,
                ).flatten(0, 1)
            )
        for first, count, start, places in plan.spans:
            positions = torch.arange(start, start + count, device=query.device)
            parts.append(
                masked_attention(
                    query[None, first : first + count],
                    flat_keys[places][None],
                    flat_values[places][None],
                    positions[None],
                    window,
                    softcap,
                    scale,
                )[0]
            )
        return torch.cat(parts).flatten(1)


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """Attention by the book, in float32, for a bounded number of scores at a time.

    Args:
        query: [B, Q, num_heads, head_dim].
        keys, values: [B, L, num_kv_heads, head_dim], positions 0 to L - 1.
        positions: int64 [B, Q] of the queries; each sees the positions up to its own.

    Returns:
        [B, Q, num_heads, head_dim] in the dtype of the query
    """
    batch, count, num_heads, head_dim = query.shape
    most = max(1, _MAX_SCORES // max(1, batch * num_heads * keys.shape[1]))
    if count > most:
        pieces = zip(query.split(most, 1), positions.split(most, 1), strict=True)
        return torch.cat(
            [masked_attention(part, keys, values, at, window, softcap, scale) for part, at in pieces], 1
        )
    grouped = query.float().view(batch, count, keys.shape[2], -1, head_dim)
    scores = capped(torch.einsum("bqkgd,blkd->bqkgl", grouped, keys.float()) * scale, softcap)
    behind = positions[:, :, None] - torch.arange(keys.shape[1], device=query.device)
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    probs = scores.masked_fill_(~seen[:, :, None, None], float("-inf")).softmax(-1)
    attended = torch.einsum("bqkgl,blkd->bqkgd", probs, values.float())
    return attended.reshape(batch, count, num_heads, head_dim).to(query.dtype)


def capped(x: Tensor, bound: float | None) -> Tensor:
    """bound * tanh(x / bound), in place; x as it is without a bound."""
    return x if bound is None else x.div_(bound).tanh_().mul_(bound)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
