"""Advantages token by token: GAE with a critic, REINFORCE++ without one."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.algos.advantages import AdvantageEstimator, register_adv_est
from verl.trainer.ppo.algos.aggregation import masked_whiten


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16) over sampled
    tokens only.

    With t+ the next *sampled* token after t (observations in between are stepped over; V = A = 0 past the
    last): delta_t = r_t + gamma * V_{t+} - V_t;  A_t = delta_t + gamma * lam * A_{t+};  returns = A + V.
    The advantages are then whitened over the sampled tokens of the batch, the returns are not.

    values [N, R]: value of the state before each token. Returns (advantages, returns), both [N, R], 0
    where masked.
    """
    mask, dtype = response_mask.bool(), values.dtype
    rewards, values = (x.masked_fill(~mask, 0.0).double() for x in (token_level_rewards, values))
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = next_advantage
    returns = (advantages + values).masked_fill(~mask, 0.0)
    return masked_whiten(advantages, mask).to(dtype), returns.to(dtype)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): discounted reward-to-go, whitened over the sampled tokens
    of the batch.

    G_t = r_t + gamma * G_{t+} with t+ the next sampled token; A = (G - mean) / std. Returns (A, G).
    """
    mask = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~mask, 0.0).double()
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    advantages, returns = masked_whiten(returns, mask), returns.masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)
