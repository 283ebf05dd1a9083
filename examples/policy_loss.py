"""A policy loss of your own: REINFORCE with a quadratic pull towards the policy that sampled.

    bash train_grpo.sh actor_rollout_ref.actor.policy_loss.loss_mode=examples.policy_loss:pulled_reinforce

A loss gets what its parameters name. `LossInputs` in verl/algos/policy_losses.py lists the possible names.
You name an advantage estimator in the same way (`algorithm.adv_estimator=package.module:function`).
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
    """Return the loss -A log pi + PULL (log pi - log pi_old)^2 of the sampled tokens, and its metrics.

    All tensors have the shape [B, R].
    """
    log_ratio = log_prob - old_log_prob
    losses = -advantages * log_prob + PULL * log_ratio**2
    pull = agg_loss(log_ratio.detach() ** 2, response_mask, loss_agg_mode, denominator=denominator)
    loss = agg_loss(losses, response_mask, loss_agg_mode, denominator=denominator)
    return loss, {"actor/pull": pull}
