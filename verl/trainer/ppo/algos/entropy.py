"""The entropy bonus."""

from __future__ import annotations

from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator, agg_loss


def compute_entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> Tensor:
    """The entropy bonus: per-token entropies [N, R] (nats, as the policy's forward gives them) reduced to
    a scalar.
    """
    return agg_loss(entropy, response_mask, loss_agg_mode, denominator)
