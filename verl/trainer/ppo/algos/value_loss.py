"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator, agg_loss


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss: 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    vpreds V, values V_old and returns R are [N, R]. Returns (loss, fraction of tokens where the clipped
    term is larger).
    """
    mask = response_mask.bool()
    vpreds, returns, values = (x.masked_fill(~mask, 0.0) for x in (vpreds, returns, values))
    clipped_vpreds = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    squared, clipped_squared = (vpreds - returns).square(), (clipped_vpreds - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(squared, clipped_squared), mask, loss_agg_mode, denominator)
    return loss, agg_loss((clipped_squared > squared).float(), mask, "token-mean", denominator)
