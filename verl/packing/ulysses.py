"""Sequence parallelism by exchanging heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

The processes of a group hold one pack of tokens together. Each has consecutive tokens, and computes what
needs only a token itself (norms, projections, feed-forward, log-probs). Attention needs all tokens, but one
head at a time. Before it the processes exchange tokens for heads, and after it heads for tokens.

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
    """The tokens of a pack that each process of a group has: consecutive ones, in the group's order.

    Attributes:
        group: the processes.
        counts: [P], how many tokens each process has.
        rank: this process's rank in the group.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    rank: int

    @classmethod
    def even(cls, num_tokens: int, group: dist.ProcessGroup) -> TokenShare:
        """Share tokens evenly; if that leaves a remainder, the first processes have one more each."""
        size = group.size()
        counts = tuple(num_tokens // size + (rank < num_tokens % size) for rank in range(size))
        return cls(group, counts, group.rank())

    @property
    def start(self) -> int:
        """Return the position in the pack of this process's first token."""
        return sum(self.counts[: self.rank])

    @property
    def stop(self) -> int:
        return self.start + self.counts[self.rank]

    def local_positions(self, positions: Tensor) -> Tensor:
        """Return the positions of this process's tokens among positions in the pack [N].

        They are counted from the process's first token.
        """
        return positions[(positions >= self.start) & (positions < self.stop)] - self.start

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads, in one exchange; differentiable.

        q [t, H, D], k and v [t, G, D] -> [T, H / P, D] and [T, G' / P, D], contiguous. Process r gets the
        r-th part of the heads. If P does not divide the G key and value heads, they are repeated so that it
        does (G' = lcm(G, P)), each query head beside the one that it belongs to.

        Raises ValueError if P does not divide the number of query heads.
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
        by_process = [x.reshape(num_tokens, size, -1) for x in (query, key, value)]
        sent = torch.cat(by_process, dim=2).transpose(0, 1).flatten(0, 1)
        received = self._exchange(sent, [num_tokens] * size, self.counts)
        widths = [x.shape[2] for x in by_process]
        q, k, v = (
            columns.reshape(len(received), -1, x.shape[2])
            for columns, x in zip(received.split(widths, dim=1), (query, key, value), strict=True)
        )
        return q, k, v

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Exchange heads for tokens, which undoes what `to_heads` does to q; differentiable.

        [T, H / P, D] -> [t, H, D].
        """
        size = len(self.counts)
        num_tokens = self.counts[self.rank]
        received = self._exchange(heads.flatten(1), self.counts, [num_tokens] * size)
        return received.view(size, num_tokens, *heads.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _exchange(self, rows: Tensor, sends: Sequence[int], gets: Sequence[int]) -> Tensor:
        return _Exchange.apply(rows, tuple(sends), tuple(gets), self.group)


class _Exchange(torch.autograd.Function):
    """An all to all of rows.

    Rows [sum of sends, W], of which the first sends[0] are for process 0, and so on, become [sum of gets, W],
    of which the first gets[0] are from process 0, and so on. In the backward pass, gradients take the other
    direction.
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
    """A gathering of the rows [n, W] of each process to all of them [N, W].

    In the backward pass each process keeps the gradient of its own rows, because the losses of the other
    processes are the same loss, not further ones.
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
    """Gather the rows [n, W] of each process of the group to all of them [N, W]; differentiable.

    `counts` holds the n of each process.
    """
    gathered: Tensor = _Gather.apply(rows, counts, group)
    return gathered
