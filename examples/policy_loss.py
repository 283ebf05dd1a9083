"""A policy loss of one's own: REINFORCE with a quadratic pull towards the policy that sampled.

    bash train_grpo.sh actor_rollout_ref.actor.policy_loss.loss_mode=examples.policy_loss:pulled_reinforce

It names as parameters what it needs; `LossInputs` in verl/algos/policy_losses.py lists what there is. An
advantage estimator is named in the same way (`algorithm.adv_estimator=package.module:function`).
"""

from typing import Any

from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss

PULL = 0.1


def pulled_reinforce(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    denominator: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi + PULL (log pi - log pi_old)^2 for each sampled token; all tensors [B, R]."""
    log_ratio = log_prob - old_log_prob
    losses = -advantages * log_prob + PULL * log_ratio**2
    pull = agg_loss(log_ratio.detach() ** 2, response_mask, loss_agg_mode, denominator)
    return agg_loss(losses, response_mask, loss_agg_mode, denominator), {"actor/pull": pull}
