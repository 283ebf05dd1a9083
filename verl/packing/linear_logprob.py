"""Log-probabilities and entropies from hidden states, without a full logits tensor.

    hidden [L, D], head weight [V, D], labels [L]  ->  log_probs, entropy, sum_pi_squared   ([L] float32)

L loss tokens, D hidden width, V vocabulary. The logits exist for one chunk of rows at a time. The backward
pass computes them again chunk by chunk, except if all rows fit into one chunk and nothing is compiled: then
the chunk is kept. Arithmetic on logits is float32 whatever the types of the inputs are, and the head's
gradient is summed in float32.

The computation can be compiled. Then one kernel reads the logits of a chunk in each direction. The ranks of a
group may have some rows of the head each. They exchange a few numbers per token: the greatest logit, and sums
over their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.device import compiled

CHUNK_ELEMENTS = 2**23  # logits in a chunk: 32 MB of float32
MIN_CHUNK_ROWS = 128  # fewer rows make the matrix products slow
GPU_CHUNK_ROWS = 2048  # for a large vocabulary: the head's gradient is summed once for each chunk


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return hidden @ weight.T / temperature in float32."""
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.mul_(1.0 / temperature)


def _own_labels(labels: Tensor, first_row: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each label is one of this rank's rows, and its index among them (0 where it is not)."""
    is_own = (labels >= first_row) & (labels < first_row + len(weight))
    return is_own, (labels - first_row) * is_own


def chunk_rows_of(vocabulary: int, on_gpu: bool) -> int:
    """Return the number of rows of a chunk of logits, for a process with `vocabulary` rows of the head."""
    return max(GPU_CHUNK_ROWS if on_gpu else MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


def _token_statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute four figures of raw logits [L, V], float32 [4, L].

    They are the label's log-prob, the entropy, the sum of squared probabilities, and the log of the sum.
    """
    logits = logits.float() / temperature
    log_sum = logits.logsumexp(-1)
    log_p = logits - log_sum[:, None]
    p = log_p.exp()
    label_log_p = log_p.gather(1, labels[:, None])[:, 0]
    return torch.stack((label_log_p, -(p * log_p).sum(-1), (p * p).sum(-1), log_sum))


def _logit_gradient(
    logits: Tensor, labels: Tensor, of_rows: Tensor, entropy: Tensor, log_sum: Tensor, temperature: float
) -> Tensor:
    """Compute the gradient of raw logits [L, V], in their type.

    `of_rows` [2, L] holds a and b of `_LinearLogProb`.
    """
    log_p = logits.float() / temperature - log_sum[:, None]
    p = log_p.exp()
    a, b = of_rows[:, :, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    grad = a * (is_label.float() - p) - b * p * (log_p + entropy[:, None])
    return (grad / temperature).to(logits.dtype)


def _eager_logit_gradient(
    log_p: Tensor,
    label_rows: Tensor,
    is_own: Tensor | None,
    output_grads: list[Tensor | None],
    entropy: Tensor,
) -> Tensor:
    """Compute the same gradient from log-probs, in float32 and with few passes, before the temperature.

    Args:
        log_p: log-probs [L, V]; for a group, of this rank's rows of the head.
        label_rows: [L], the labels' rows.
        is_own: [L], whether this rank has the label's row. None: it has all of them.
        output_grads: a and b of `_LinearLogProb`, [L, 1] each, or None.
        entropy: [L, 1].
    """
    p = log_p.exp()
    label_grad, b = output_grads
    a = 0.0 if label_grad is None else label_grad
    grad = p.mul_(-a) if b is None else p.mul_(torch.addcmul(-a - b * entropy, log_p, -b))
    if label_grad is not None:
        own_label_grad = label_grad if is_own is None else label_grad * is_own[:, None]
        grad.scatter_add_(1, label_rows.unsqueeze(1), own_label_grad)
    return grad


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return compiled(function)


class _LinearLogProb(torch.autograd.Function):
    """Log-prob of the label, entropy and sum of squared probabilities under p = softmax(z).

    H is the entropy of p. Where the loss has gradients a for log p[label] and b for H:
    dz = a (onehot - p) - b p (log p + H). The gradient of `hidden` is what the rank's own rows of the head
    give.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        rows: int,
        first_row: int,
        group: dist.ProcessGroup | None,
        compiles: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # log_sum is, for each token, the logarithm of the sum of exp(logits) over the group's rows.
        log_probs, entropy, sum_pi_squared, log_sum = (
            hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(4)
        )
        log_p: Tensor | None = None
        chunks = [slice(start, start + rows) for start in range(0, len(hidden), rows)]
        for chunk in chunks:
            if compiles:
                figures = _compiled(_token_statistics)(hidden[chunk] @ weight.t(), labels[chunk], temperature)
                log_probs[chunk] = figures[0]
                log_sum[chunk] = figures[3]
                if with_entropy:
                    entropy[chunk] = figures[1]
                if with_sum_pi_squared:
                    sum_pi_squared[chunk] = figures[2]
                continue
            log_p = None  # frees the previous chunk
            logits = _logits(hidden[chunk], weight, temperature)
            if group is None:
                log_p = torch.log_softmax(logits, dim=-1)
                del logits
                log_probs[chunk] = log_p.gather(1, labels[chunk].unsqueeze(1)).squeeze(1)
                if with_entropy or with_sum_pi_squared:
                    p = log_p.exp()
                    if with_entropy:
                        entropy[chunk] = -torch.linalg.vecdot(p, log_p)
                    if with_sum_pi_squared:
                        sum_pi_squared[chunk] = torch.linalg.vecdot(p, p)
                    del p
                continue
            greatest = logits.amax(1)
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
            logits -= greatest[:, None]
            is_own, label_rows = _own_labels(labels[chunk], first_row, weight)
            powers = logits.exp()
            sums = [powers.sum(1), logits.gather(1, label_rows[:, None])[:, 0] * is_own]
            if with_entropy:
                sums.append(torch.linalg.vecdot(powers, logits))
            if with_sum_pi_squared:
                sums.append(torch.linalg.vecdot(powers, powers))
            summed = torch.stack(sums)
            dist.all_reduce(summed, group=group)
            total = summed[0]
            log_total = summed[0].log()
            log_sum[chunk] = log_total + greatest
            log_probs[chunk] = summed[1] - log_total
            if with_entropy:
                entropy[chunk] = log_total - summed[2] / total
            if with_sum_pi_squared:
                sum_pi_squared[chunk] = summed[-1] / total.square()
            log_p = logits.sub_(log_total[:, None])
            del logits, powers
        saved_log_p = log_p if len(chunks) == 1 else None  # None where it is compiled
        ctx.save_for_backward(hidden, weight, labels, entropy, log_sum, saved_log_p)
        ctx.chunks = chunks
        ctx.temperature = temperature
        ctx.first_row = first_row
        ctx.group = group
        ctx.compiles = compiles
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sum_pi_squared, *([] if with_entropy else [entropy]))
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        hidden, weight, labels, entropy, log_sum, log_p = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        output_grads = [grad_log_probs, grad_entropy]
        for chunk in ctx.chunks:
            if ctx.compiles:
                logits = hidden[chunk] @ weight.t()
                chunk_grads = [
                    torch.zeros_like(entropy[chunk]) if x is None else x[chunk] for x in output_grads
                ]
                row_values = torch.stack(chunk_grads), entropy[chunk], log_sum[chunk]
                grad_logits = _compiled(_logit_gradient)(logits, labels[chunk], *row_values, ctx.temperature)
            else:
                if len(ctx.chunks) > 1:
                    log_p = _logits(hidden[chunk], weight, ctx.temperature)
                    log_p = log_p.log_softmax(-1) if ctx.group is None else log_p.sub_(log_sum[chunk, None])
                columns = [None if x is None else x[chunk].unsqueeze(1) for x in output_grads]
                is_own = None
                label_rows = labels[chunk]
                if ctx.group is not None:
                    is_own, label_rows = _own_labels(label_rows, ctx.first_row, weight)
                grad_logits = _eager_logit_gradient(
                    log_p, label_rows, is_own, columns, entropy[chunk].unsqueeze(1)
                )
                if ctx.temperature != 1.0:
                    grad_logits.mul_(1.0 / ctx.temperature)
                grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is None:  # a frozen head, beside LoRA adapters
                continue
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk])
            elif ctx.compiles:
                torch.addmm(grad_weight, grad_logits.t(), hidden[chunk], torch.float32, out=grad_weight)
            else:
                grad_weight += grad_logits.t() @ hidden[chunk]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 8


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
    compiles: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs of labels, entropies, and sums of squared probabilities.

    All are under softmax(hidden @ weight.T / temperature). The entropy is in nats, and the squared
    probabilities are summed over the vocabulary.

    Args:
        hidden: [L, D] of float32 or a 16-bit type. The product is taken in the type of autocast if that is
            on, else in the type of `weight`.
        weight: [V, D] of float32 or a 16-bit type.
        labels: [L] int64.
        temperature: divides the logits; above 0.
        with_entropy: whether the entropy is computed. If not, it is 0.
        with_sum_pi_squared: whether the sum of squares is computed. If not, it is 0.
        chunk_rows: rows of a chunk; by default `chunk_rows_of` decides.
        group: its ranks have equally many rows of the head each, in their order. Everything else, and the
            results, are the same on every rank. hidden gets the gradient that the rank's own rows give; the
            caller sums it over the group.
        vocabulary: rows of the head past this number are padding.
        compiles: whether torch.compile compiles the arithmetic on logits, which takes seconds once. It is
            ignored for a group.

    Returns:
        (log_probs, entropy, sum_pi_squared), all [L] float32. The first two carry gradients to hidden and
        weight.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive for log-probabilities, found {temperature}.")
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    rows = chunk_rows or chunk_rows_of(len(weight), device_type != "cpu")  # the same on every rank
    first_row = 0 if group is None else group.rank() * len(weight)
    if vocabulary is not None and first_row + len(weight) > vocabulary:
        weight = weight[: vocabulary - first_row]
    with torch.autocast(device_type, enabled=False):
        return _LinearLogProb.apply(
            hidden,
            weight,
            labels,
            temperature,
            with_entropy,
            with_sum_pi_squared,
            rows,
            first_row,
            group,
            compiles and group is None,
        )
