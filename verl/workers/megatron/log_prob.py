"""Log-probabilities and entropies where each tensor rank has some rows of the output matrix.

    hidden [L, D], own rows of the head [V / n, D], labels [L] -> log_probs, entropy, sum_pi_squared  [L]

L loss tokens, D hidden width, V vocabulary, n tensor ranks. As `verl.utils.linear_logprob`, whose definitions
these are: logits exist for one chunk of tokens at a time, in float32, and are computed again in the backward
pass (one chunk alone is kept). Ranks exchange a few numbers per token: the greatest logit, and sums over
their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.linear_logprob import CHUNK_ELEMENTS, MIN_CHUNK_ROWS


class _VocabParallelLogProb(torch.autograd.Function):
    """With p = softmax(z), H its entropy and gradients a of log p[label], b of H: dz = a (onehot - p) - b
    p (log p + H). The gradient of `hidden` is what the own rows of the head give: the caller sums it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        first_row: int,
        group: dist.ProcessGroup,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # log_sum: of each token, the logarithm of the sum of exp(logits)
        log_sum, log_probs, entropy, sum_pi_squared = (
            hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(4)
        )
        log_p: Tensor | None = None
        for chunk in _chunks(len(hidden), rows):
            logits = _logits(hidden[chunk], weight, temperature)
            greatest = logits.amax(1)
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
            logits -= greatest[:, None]
            own, places = _own_labels(labels[chunk], first_row, weight)
            picked = logits.gather(1, places[:, None])[:, 0] * own
            powers = logits.exp()
            sums = [powers.sum(1), picked]
            if with_entropy:
                sums.append(torch.linalg.vecdot(powers, logits))
            if with_sum_pi_squared:
                sums.append(torch.linalg.vecdot(powers, powers))
            summed = torch.stack(sums)
            dist.all_reduce(summed, group=group)
            total, log_total = summed[0], summed[0].log()
            log_sum[chunk] = log_total + greatest
            log_probs[chunk] = summed[1] - log_total
            if with_entropy:
                entropy[chunk] = log_total - summed[2] / total
            if with_sum_pi_squared:
                sum_pi_squared[chunk] = summed[-1] / total.square()
            log_p = logits.sub_(log_total[:, None]) if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, labels, log_sum, entropy, log_p)
        ctx.first_row, ctx.temperature, ctx.rows = first_row, temperature, rows
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sum_pi_squared, *([] if with_entropy else [entropy]))
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        hidden, weight, labels, log_sum, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(hidden), ctx.rows):
            log_p = kept
            if log_p is None:
                log_p = _logits(hidden[chunk], weight, ctx.temperature).sub_(log_sum[chunk, None])
            grad_logits = log_p.exp()
            a = 0.0 if grad_log_probs is None else grad_log_probs[chunk, None]
            if grad_entropy is None:
                grad_logits.mul_(-a)
            else:
                b = grad_entropy[chunk, None]
                grad_logits.mul_(torch.addcmul(-a - b * entropy[chunk, None], log_p, -b))
            if grad_log_probs is not None:
                own, places = _own_labels(labels[chunk], ctx.first_row, weight)
                grad_logits.scatter_add_(1, places[:, None], (grad_log_probs[chunk] * own)[:, None])
            if ctx.temperature != 1.0:
                grad_logits.mul_(1.0 / ctx.temperature)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[chunk]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden @ weight.T / temperature, float32."""
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.mul_(1.0 / temperature)


def _own_labels(labels: Tensor, first_row: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(whether each label is one of this rank's rows, which of them; 0 where it is not)."""
    own = (labels >= first_row) & (labels < first_row + len(weight))
    return own, (labels - first_row) * own


def _chunks(num_rows: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


def vocab_parallel_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log_probs, entropy, sum_pi_squared), all [L] float32, the same on every rank of the group.

    hidden [L, D], the same on every rank; weight [rows, D], this rank's rows of the output matrix, rank r's
    beginning at r * rows (those past `vocabulary` are padding and take no part); labels [L] int64. The first
    two results carry gradients: to this rank's weight, and to hidden what this rank's rows give, to be summed
    over the group by the caller; what was not asked for is 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive for log-probabilities, found {temperature}.")
    first_row = group.rank() * len(weight)
    rows = chunk_rows or max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // len(weight))  # the same on every rank
    if first_row + len(weight) > vocabulary:
        weight = weight[: vocabulary - first_row]
    return _VocabParallelLogProb.apply(
        hidden, weight, labels, first_row, group, temperature, with_entropy, with_sum_pi_squared, rows
    )
