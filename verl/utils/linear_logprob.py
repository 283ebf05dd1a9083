"""Log-probabilities and entropies from hidden states, without a full logits tensor.

    hidden [L, D], head weight [V, D], labels [L]  ->  log_probs, entropy, sum_pi_squared   ([L] float32)

L loss tokens, D hidden width, V vocabulary. The logits exist for one chunk of rows at a time; the backward
pass computes them again chunk by chunk (when all rows fit into one chunk, that chunk is kept instead).
Arithmetic on logits is float32 whatever the inputs are; the head's gradient is summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**23  # logits in a chunk: 32 MB of float32
MIN_CHUNK_ROWS = 128  # fewer rows make the matrix products slow


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ weight.T / temperature), float32."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.mul_(1.0 / temperature)
    return torch.log_softmax(logits, dim=-1)


class _LinearLogProb(torch.autograd.Function):
    """p = softmax(z), H is its entropy. Where the loss has gradients a for log p[label] and b for H:
    dz = a (onehot - p) - b p (log p + H).
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, sum_pi_squared = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        log_p: Tensor | None = None
        for chunk in _chunks(len(hidden), rows):
            log_p = _log_softmax(hidden[chunk], weight, temperature)
            log_probs[chunk] = log_p.gather(1, labels[chunk].unsqueeze(1)).squeeze(1)
            if with_entropy or with_sum_pi_squared:
                p = log_p.exp()
                if with_entropy:
                    entropy[chunk] = -torch.linalg.vecdot(p, log_p)
                if with_sum_pi_squared:
                    sum_pi_squared[chunk] = torch.linalg.vecdot(p, p)
        ctx.save_for_backward(hidden, weight, labels, entropy, log_p if len(hidden) <= rows else None)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sum_pi_squared, *([] if with_entropy else [entropy]))
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        hidden, weight, labels, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(hidden), ctx.rows):
            log_p = _log_softmax(hidden[chunk], weight, ctx.temperature) if kept is None else kept
            p = log_p.exp()
            a = 0.0 if grad_log_probs is None else grad_log_probs[chunk].unsqueeze(1)
            if grad_entropy is None:
                grad_logits = p.mul_(-a)
            else:
                b = grad_entropy[chunk].unsqueeze(1)
                grad_logits = p.mul_(torch.addcmul(-a - b * entropy[chunk].unsqueeze(1), log_p, -b))
            if grad_log_probs is not None:
                grad_logits.scatter_add_(1, labels[chunk].unsqueeze(1), grad_log_probs[chunk].unsqueeze(1))
            if ctx.temperature != 1.0:
                grad_logits.mul_(1.0 / ctx.temperature)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is None:  # a frozen head, beside LoRA adapters
                continue
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk])
            else:
                grad_weight += grad_logits.t() @ hidden[chunk]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(num_rows: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, entropy of its distribution (nats) and the sum over the vocabulary of
    its squared probabilities, under softmax(hidden @ weight.T / temperature).

    hidden [L, D] and weight [V, D] of float32 or a 16-bit type (the product is taken in the type of
    autocast, if that is on, else in theirs), labels [L] int64. Returns (log_probs, entropy,
    sum_pi_squared), all [L] float32. The first two carry gradients to hidden and weight; what was not asked
    for is 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive for log-probabilities, found {temperature}.")
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    rows = chunk_rows or max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // weight.shape[0])
    with torch.autocast(device_type, enabled=False):
        return _LinearLogProb.apply(
            hidden, weight, labels, temperature, with_entropy, with_sum_pi_squared, rows
        )
