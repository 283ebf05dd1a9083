"""From per-token losses to a scalar, and means over the tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far outside of any clip range, and finite in float32
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), mean and unbiased variance taken where mask is 1; 0 elsewhere."""
    mask = mask.bool()
    kept = values[mask]
    if kept.numel() == 0:
        return torch.zeros_like(values)
    variance = kept.var() if kept.numel() > 1 else kept.new_zeros(())
    return ((values - kept.mean()) * torch.rsqrt(variance + epsilon)).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class LossDenominator:
    """What a loss over the whole mini-batch (all micro-batches, all ranks) is divided by.

    num_tokens: sampled tokens; num_sequences: rows with at least one. A micro-batch's losses and metrics
    divided by these add up to those of the whole mini-batch, however it was split.
    """

    num_tokens: float
    num_sequences: float

    @classmethod
    def of(cls, mask: Tensor) -> LossDenominator:
        """Counts the [N, R] mask of a whole mini-batch; at least 1 each, so that an empty one gives a loss
        of 0.
        """
        mask = mask.bool()
        return cls(max(float(mask.sum()), 1.0), max(float(mask.any(dim=-1).sum()), 1.0))


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, denominator: LossDenominator | None = None
) -> Tensor:
    """Reduces per-token losses [N, R] to a scalar over the entries where the mask is 1.

    token-mean: sum over tokens / number of tokens (DAPO, arXiv:2503.14476). seq-mean-token-sum: sum over
    tokens / number of rows (Dr. GRPO). seq-mean-token-mean: mean of each row's token mean (GRPO). The
    numbers that are divided by come from `denominator`, by default this very mask: give the whole
    mini-batch's for a part of it.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode: found {loss_agg_mode!r}, expected one of {', '.join(LOSS_AGG_MODES)}."
        )
    mask = loss_mask.bool()
    denominator = denominator or LossDenominator.of(mask)
    loss_mat = loss_mat.masked_fill(~mask, 0.0)
    if loss_agg_mode == "token-mean":
        return loss_mat.sum() / denominator.num_tokens
    if loss_agg_mode == "seq-mean-token-mean":
        loss_mat = loss_mat / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return loss_mat.sum() / denominator.num_sequences
