"""Attention over the slots' KV state: one query per running slot (decode), or a run of new tokens (prefill).

Decode. Cost is memory traffic over keys and values, so they are read where they lie: over the prefix of
slots, cut to the longest running length. When few slots run, or lengths differ much, gathering slots of like
length into buckets reads less; `plan_decode` takes the cheaper of the two. Query heads that share a KV head
are folded into the query-length axis. The products are written as K @ q and p @ V, which on CPU run at 1.2
(float32) to 3 (bfloat16) times the speed of scaled_dot_product_attention for a single query.

Prefill. Sequence by sequence with scaled_dot_product_attention on views: no padding, no copy of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.native.step_batch import StepBatch

_BUCKET = 32  # key lengths are rounded up to a multiple of it
_GATHER_COST = 1.3  # reading a gathered position, relative to reading it in place (measured: 1.05 to 1.4)
_BUCKET_COST = 1 << 16  # one more bucket, in elements of keys read


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
    """Attention by the book, in float32.

    Args:
        query: [B, Q, num_heads, head_dim].
        keys, values: [B, L, num_kv_heads, head_dim], positions 0 to L - 1.
        positions: int64 [B, Q] of the queries; each sees the positions up to its own.

    Returns:
        [B, Q, num_heads, head_dim] in the dtype of the query
    """
    batch, count, num_heads, head_dim = query.shape
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


@dataclass
class DecodeGroup:
    """Running slots that are attended to in one go.

    Attributes:
        slots: rows of the cache: a slice (read in place) or an index tensor (gathered).
        rows: which rows of the decode batch they serve (None = all, in order).
        scatter: where those rows stand among `slots` (None = one to one); the rest of the result is unused.
        lengths: int64 [slots], number of positions to attend to, the new token included.
        length: their largest, rounded up: the size of the key axis.
    """

    slots: slice | Tensor
    rows: Tensor | None
    scatter: Tensor | None
    lengths: Tensor
    length: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [slots, 1, 1, length]: 0 where a slot may look, -inf elsewhere."""
        if window not in self._masks:
            positions = torch.arange(self.length, device=self.lengths.device)
            hidden = positions >= self.lengths[:, None]
            if window is not None:
                hidden |= positions < (self.lengths - window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


def plan_decode(
    slots: np.ndarray, lengths: np.ndarray, cache_length: int, position_size: int, device: torch.device
) -> list[DecodeGroup]:
    """Choose how the running slots read the cache.

    Args:
        slots: int64 [A], ascending; lengths: int64 [A], positions to attend to, the new token included.
        cache_length: size of the cache's length axis; no group reads beyond it.
        position_size: elements of a position's keys (KV heads * head size).
    """
    if len(slots) == 0:
        return []
    longest = int(lengths.max())
    buckets = -(-lengths // _BUCKET)
    tops, gathered = _merged_buckets(buckets, _BUCKET_COST / position_size)
    prefix = int(slots[-1]) + 1
    if prefix * _rounded(longest, cache_length) <= gathered:
        spread = np.ones(prefix, dtype=np.int64)
        spread[slots] = lengths
        return [
            DecodeGroup(
                slots=slice(0, prefix),
                rows=None,
                scatter=None if prefix == len(slots) else _to(slots, device),
                lengths=_to(spread, device),
                length=_rounded(longest, cache_length),
            )
        ]
    groups = []
    for low, high in zip([0, *tops], tops, strict=False):
        rows = np.flatnonzero((buckets > low) & (buckets <= high))
        of_rows = lengths[rows]
        groups.append(
            DecodeGroup(
                slots=_to(slots[rows], device),
                rows=None if len(tops) == 1 else _to(rows, device),
                scatter=None,
                lengths=_to(of_rows, device),
                length=_rounded(int(of_rows.max()), cache_length),
            )
        )
    return groups


def _merged_buckets(buckets: np.ndarray, overhead: float) -> tuple[list[int], float]:
    """Upper ends of the buckets worth having (ascending), and what reading them costs, in positions.

    From the longest down, a bucket joins the next longer one unless reading it apart saves `overhead`.
    """
    counts = np.bincount(buckets).tolist()
    tops: list[int] = []
    cost = 0.0
    for bucket in range(len(counts) - 1, 0, -1):
        if not counts[bucket]:
            continue
        unit = _GATHER_COST * _BUCKET * counts[bucket]
        if not tops or unit * (tops[-1] - bucket) > overhead:
            tops.append(bucket)
            cost += overhead
        cost += unit * tops[-1]
    return tops[::-1], cost


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, groups: list[DecodeGroup], window: int | None
) -> Tensor:
    """One query per running slot.

    Args:
        query: [A, num_heads, head_dim], rotated.
        keys, values: the layer's cache [slots, num_kv_heads, length, head_dim], the new token already in it.
        groups: from `plan_decode`; together they cover the A rows.

    Returns:
        [A, num_heads * head_dim]
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    query = (query * head_dim**-0.5).view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if len(groups) == 1 and groups[0].rows is None:
        return _attend(query, keys, values, groups[0], window).reshape(num_rows, -1)
    result = torch.empty_like(query)
    for group in groups:
        result[group.rows] = _attend(query[group.rows], keys, values, group, window)
    return result.view(num_rows, -1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, window: int | None) -> Tensor:
    """query [n, KV heads, group of heads, head_dim] -> the same shape."""
    keys, values = keys[:, :, : group.length], values[:, :, : group.length]
    if isinstance(group.slots, slice):
        keys, values = keys[group.slots], values[group.slots]
    else:
        keys, values = keys.index_select(0, group.slots), values.index_select(0, group.slots)
    if group.scatter is not None:
        spread = query.new_zeros((keys.shape[0], *query.shape[1:]))
        spread[group.scatter] = query
        query = spread
    scores = torch.matmul(keys, query.transpose(2, 3)).transpose(2, 3)
    probs = torch.softmax(scores + group.mask(window, query.dtype), -1)
    result = torch.matmul(probs, values)
    return result if group.scatter is None else result[group.scatter]


@dataclass
class PrefillSpan:
    """A run of new tokens of one slot: rows `first`..`first + count` of the packed batch.

    `start` is the number of positions the slot has already; `slot` is where they are.
    """

    slot: int
    start: int
    first: int
    count: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """bool [count, start + count], True = may look."""
        if window not in self._masks:
            mask = torch.ones(self.count, self.start + self.count, dtype=torch.bool, device=device)
            mask.tril_(self.start)
            if window is not None:
                mask.triu_(self.start - window + 1)
            self._masks[window] = mask
        return self._masks[window]


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    span: PrefillSpan,
    window: int | None,
) -> Tensor:
    """All queries of one span; causal.

    Args:
        query: [T, num_heads, head_dim]; key, value: [T, num_kv_heads, head_dim] of the whole packed batch.
        keys, values: the layer's cache, the span's own tokens already in it.

    Returns:
        [count, num_heads * head_dim]
    """
    rows = slice(span.first, span.first + span.count)
    end = span.start + span.count
    masked = span.start > 0 or (window is not None and end > window)
    if span.start == 0:
        own_keys, own_values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
    else:
        own_keys, own_values = keys[span.slot, :, :end], values[span.slot, :, :end]
    result = F.scaled_dot_product_attention(
        query[rows].transpose(0, 1)[None],
        own_keys[None],
        own_values[None],
        attn_mask=span.mask(window, query.device) if masked else None,
        is_causal=not masked,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0].transpose(0, 1).reshape(span.count, -1)


def _rounded(length: int, most: int) -> int:
    return min(most, -(-length // _BUCKET) * _BUCKET)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
