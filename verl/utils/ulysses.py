"""Sequence parallelism by exchanging heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

The processes of a group hold one pack of tokens together: each has consecutive ones, and computes what needs
a token alone (norms, projections, feed-forward, log-probs). Attention needs all tokens, but one head at a
time: before it the processes exchange tokens for heads, and after it heads for tokens.

    micro-batch [T] --shard_micro_batch--> own tokens [t] --model--> [t, H, D] --to_heads--> [T, H / P, D]
    --attention--> [T, H / P, D] --to_tokens--> [t, H, D] --model--> own outputs [u] --gather--> [U]

Legend: P processes of the group, T tokens of the pack, t those of a process (t differs by at most one between
processes), H heads, D width of a head, U distinct loss tokens of the pack, u those of a process.

Gradients: every process computes the same loss from the same gathered outputs, and the gradient that it finds
for a weight is what its own tokens give. The whole gradient is the sum over the group's processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TokenShare:
    """Which tokens of a pack the processes of a group have: consecutive ones, in the group's order.

    group: the processes. counts [P]: how many tokens each has. rank: this one's place in the group.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    rank: int

    @classmethod
    def even(cls, num_tokens: int, group: dist.ProcessGroup) -> TokenShare:
        """As many for each; the first ones have one more where it does not divide."""
        size = group.size()
        counts = tuple(num_tokens // size + (rank < num_tokens % size) for rank in range(size))
        return cls(group, counts, group.rank())

    @property
    def start(self) -> int:
        """Place in the pack of this process's first token."""
        return sum(self.counts[: self.rank])

    @property
    def stop(self) -> int:
        return self.start + self.counts[self.rank]

    def own(self, places: Tensor) -> Tensor:
        """Of places in the pack [N] those of this process's tokens, counted from its first one."""
        return places[(places >= self.start) & (places < self.stop)] - self.start

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens for heads: q [t, H, D], k and v [t, G, D] -> [T, H / P, D] and [T, G' / P, D], contiguous.

        Process r gets the r-th part of the heads. Where P does not divide the G key and value heads they are
        repeated so that it does (G' = lcm(G, P)), each query head beside the one that it belongs to.
        Differentiable, in one exchange. ValueError: P does not divide the number of query heads.
        """
        size = len(self.counts)
        num_tokens, num_heads = query.shape[:2]
        if num_heads % size:
            raise ValueError(
                f"Sequence parallelism over {size} processes needs a number of attention heads that {size} "
                f"divides; found {num_heads} on each of them."
            )
        repeats = math.lcm(key.shape[1], size) // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        parts = [x.reshape(num_tokens, size, -1) for x in (query, key, value)]
        sent = torch.cat(parts, dim=2).transpose(0, 1).flatten(0, 1)
        got = self._exchange(sent, [num_tokens] * size, self.counts)
        widths = [part.shape[2] for part in parts]
        q, k, v = (
            part.reshape(len(got), -1, x.shape[2])
            for part, x in zip(got.split(widths, dim=1), (query, key, value), strict=True)
        )
        return q, k, v

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Heads for tokens: [T, H / P, D] -> [t, H, D]. Differentiable; undoes what `to_heads` does to q."""
        size = len(self.counts)
        num_tokens = self.counts[self.rank]
        got = self._exchange(heads.flatten(1), self.counts, [num_tokens] * size)
        return got.view(size, num_tokens, *heads.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _exchange(self, rows: Tensor, sends: Sequence[int], gets: Sequence[int]) -> Tensor:
        return _Exchange.apply(rows, tuple(sends), tuple(gets), self.group)


class _Exchange(torch.autograd.Function):
    """All to all: rows [sum of sends, W], the first sends[0] of them for process 0, ... -> [sum of gets, W],
    the first gets[0] of them from process 0, ... Going back, gradients take the other direction.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: tuple[int, ...], gets: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sends = sends
        ctx.gets = gets
        ctx.group = group
        out = rows.new_empty(sum(gets), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), list(gets), list(sends), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(grad, ctx.gets, ctx.sends, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    """Rows [n, W] of each process -> all of them [N, W]. Going back each process keeps the gradient of its
    own rows: the others' losses are the same loss, not further ones.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.start = sum(counts[: group.rank()])
        ctx.num_rows = len(rows)
        out = rows.new_empty(sum(counts), rows.shape[1])
        sent = rows.repeat(len(counts), 1)  # an all to all, since gloo gathers only equal sizes
        dist.all_to_all_single(out, sent, list(counts), [len(rows)] * len(counts), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.narrow(0, ctx.start, ctx.num_rows), None, None


def gather_rows(rows: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Rows [n, W] of each process of the group -> all of them [N, W]; counts: n of each. Differentiable."""
    gathered: Tensor = _Gather.apply(rows, counts, group)
    return gathered
