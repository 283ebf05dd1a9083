"""Causal attention of one long sequence on CPU in float32, where it beats SDPA (by about a quarter).

Queries are taken block by block, each against only the keys that it may see, so the work is that of the
triangle. The probabilities are kept for the backward pass: a fifth less to compute than SDPA, which makes
them again, for `4 * heads * queries * keys / 2` bytes. `is_worth_it` says where this pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64  # queries
FEWEST_SCORES = 2**17  # heads * queries * keys: below, SDPA's single call is faster
MOST_SCORES = 2**25  # above, SDPA: 64 MB of probabilities a layer would be kept


def is_worth_it(query: Tensor, num_keys: int) -> bool:
    """Whether `causal_attention` is the faster way for query [H, N, D], and its memory bearable."""
    scores = query.shape[0] * query.shape[1] * num_keys
    return (
        query.device.type == "cpu" and query.dtype == torch.float32 and FEWEST_SCORES <= scores <= MOST_SCORES
    )


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attention of a sequence: query [H, N, D], key and value [G, K, D] (G divides H) -> [H, N, D], float32.

    places [N] int64, ascending: where among the keys each query stands; it sees the keys up to there, of
    these the last `window` if one is given.
    """
    is_kept = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return _CausalAttention.apply(query, key, value, places, scale, window, is_kept)


class _CausalAttention(torch.autograd.Function):
    """With P the probabilities, O = P V: dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = dS K, dK = dS' Q."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Tensor,
        scale: float,
        window: int | None,
        is_kept: bool,
    ) -> Tensor:
        query = _by_group(query, len(key)) * scale
        key_t = key.transpose(1, 2)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        blocks, kept = list(_blocks(places, window)), []
        for rows, keys in blocks:
            scores = torch.bmm(_rows(query, rows), key_t[:, :, keys])
            _hide_(scores, places[rows], keys, window)
            torch.softmax(scores, -1, out=scores)
            out[:, :, rows] = torch.bmm(scores, value[:, keys]).view_as(out[:, :, rows])
            if is_kept:
                kept.append(scores)
        if is_kept:
            ctx.save_for_backward(query, key, value, *kept)
        ctx.blocks, ctx.scale = blocks, scale
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, key, value, *kept = ctx.saved_tensors
        grad_out, value_t = _by_group(grad_out, len(key)), value.transpose(1, 2)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros(x.shape, dtype=x.dtype) for x in (key, value))
        for (rows, keys), probs in zip(ctx.blocks, kept, strict=True):
            grad = _rows(grad_out, rows)
            grad_value[:, keys].baddbmm_(probs.transpose(1, 2), grad)
            grad_probs = torch.bmm(grad, value_t[:, :, keys])
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            grad_query[:, :, rows] = torch.bmm(grad_scores, key[:, keys]).view_as(grad_query[:, :, rows])
            grad_key[:, keys].baddbmm_(grad_scores.transpose(1, 2), _rows(query, rows))
        return grad_query.mul_(ctx.scale).flatten(0, 1), grad_key, grad_value, None, None, None, None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[H, N, D] -> [G, H / G, N, D]."""
    return x.unflatten(0, (groups, -1))


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows of all heads of a group, one below the other: [G, r, N, D] -> [G, r * rows, D]."""
    return x[:, :, rows].flatten(1, 2)


def _blocks(places: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """(queries, all keys that any of them sees) of each block."""
    for start in range(0, len(places), BLOCK):
        rows = slice(start, min(start + BLOCK, len(places)))
        first, last = int(places[rows.start]), int(places[rows.stop - 1])
        yield rows, slice(0 if window is None else max(0, first - window + 1), last + 1)


def _hide_(scores: Tensor, places: Tensor, keys: slice, window: int | None) -> None:
    """Puts -inf where a query does not see a key. scores [G, r * rows, keys]."""
    begin = keys.start if window is not None else int(places[0])  # every query of the block sees those before
    at = torch.arange(begin, keys.stop)
    hidden = at > places[:, None]
    if window is not None:
        hidden |= at <= places[:, None] - window
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    scores.unflatten(1, (-1, len(places)))[..., begin - keys.start :].add_(bias)
