"""A loss that does not know how old its tokens are, for scripts/plot_runs.py staleness.

bash train_grpo.sh ... actor_rollout_ref.actor.policy_loss.loss_mode=scripts.bench.uncorrected:policy_gradient
"""

from typing import Any

from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss


def policy_gradient(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str, denominator: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -A log pi of each sampled token, as if the present weights had sampled it.

    All tensors are [B, R].
    """
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, denominator=denominator), {}
