"""Advantages token by token, or against a baseline from outside of the batch.

GAE uses a critic, REINFORCE++ the rewards to come. ReMax compares with a greedy answer, RAE with a mean that
is kept over steps. The optimal token baseline (Li et al. 2026, arXiv:2602.07078) gives each position a
baseline of its own, weighted by how much gradient it multiplies. At a position t that several rows i of a
group have reached, with G_t the sum of a row's rewards from t on:

    A_t = G_t - B_t,   B_t = sum_i G_t W_t / sum_i W_t,   W_t = sum over sampled tokens j <= t of rho_j^2 w_j
    w_j = 1 - 2 pi_j + sum over the vocabulary of pi^2    (squared norm of the log-prob's gradient by logits)

W is the energy of the gradient so far, pi_j the probability of the sampled token, rho_j its importance weight
(`rollout_is_weights`; 1 without).

The functions take verl's keywords; for `others` see `group_estimators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages import (
    Groups,
    RunningBaseline,
    expand_to_tokens,
    outcome_scores,
    refuse_unknown,
    register_adv_est,
)
from verl.algos.aggregation import masked_whiten
from verl.algos.registry import config_value

Index = Sequence[Any] | np.ndarray


def _rewards_to_go(token_level_rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of a row's rewards from each sampled token on, [N, R] float64; 0 elsewhere."""
    rewards = token_level_rewards.masked_fill(~mask, 0.0).double()
    return rewards.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0.0)


@register_adv_est("gae", token_wise=True)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation over sampled tokens only.

    This is equation 16 of Schulman et al. 2015, arXiv:1506.02438. Let t+ be the next *sampled* token after t.
    Observations in between are stepped over, and V = A = 0 past the last token.
    delta_t = r_t + gamma * V_{t+} - V_t;  A_t = delta_t + gamma * lam * A_{t+};  returns = A + V.
    The advantages are then whitened over the sampled tokens of the batch, the returns are not.

    Args:
        token_level_rewards: r [N, R].
        values: V [N, R], value of the state before each token.
        response_mask: [N, R], 1 where the policy sampled the token.
        gamma: discount per sampled token.
        lam: lambda.

    Returns:
        (advantages, returns), both [N, R], 0 where masked.
    """
    mask = response_mask.bool()
    dtype = values.dtype
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


@register_adv_est("reinforce_plus_plus", token_wise=True)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    gamma: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of REINFORCE++ (Hu 2025, arXiv:2501.03262) from the discounted reward-to-go.

    G_t = r_t + gamma * G_{t+} with t+ the next sampled token; A = (G - mean) / std, whitened over the sampled
    tokens of the batch. Returns (A, G). gamma is the argument, or without it that of `config`, as in verl.

    Raises ValueError if neither is given.
    """
    refuse_unknown("reinforce_plus_plus", others)
    if gamma is None:
        gamma = float(config_value(config, "gamma", "reinforce_plus_plus"))
    mask = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~mask, 0.0).double()
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    advantages = masked_whiten(returns, mask)
    returns = returns.masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of ReMax, whose baseline is the greedy answer's score.

    The method is that of Li et al. 2023, arXiv:2310.10505. A_t = G_t - b, where G_t is the sum of the rewards
    from sampled token t on and b is the row's `reward_baselines` [N]. Returns (A, G).
    """
    refuse_unknown("remax", others)
    mask = response_mask.bool()
    returns = _rewards_to_go(token_level_rewards, mask)
    advantages = (returns - reward_baselines.double().unsqueeze(-1)).masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est("rae")
def compute_rae_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    running_baseline: RunningBaseline,
    baseline_keys: Sequence[str] | np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages A = score - b of role-conditioned advantage estimation.

    The method is that of SPIRAL (Liu et al. 2025, arXiv:2506.24119). b is the running mean of the row's
    `baseline_keys` [N] from the steps before. It does not depend on the scores that it is subtracted from, so
    the gradient stays unbiased. (The paper writes the update first; its code and prime-rl do as here.) The
    estimator needs no groups. Afterwards call `running_baseline.update` with these rewards.
    """
    mask = response_mask.bool()
    baselines = running_baseline.baselines(baseline_keys).to(mask.device)
    return expand_to_tokens(
        outcome_scores(token_level_rewards, mask) - baselines, mask, token_level_rewards.dtype
    )


def _against_optimal_baseline(
    token_level_rewards: Tensor,
    mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None,
    positions: Tensor,
    handle_zero_tail: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return (A, G) [N, R]; tokens of a group with equal `positions` [N, R] share a baseline."""
    probs = old_log_probs.masked_fill(~mask, 0.0).double().exp()
    energy = 1 - 2 * probs + sum_pi_squared.masked_fill(~mask, 0.0).double()
    energy = energy.clamp(min=0)  # it is at least (1 - pi)^2, but float32 probabilities may round below 0
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.masked_fill(~mask, 0.0).double().square()
    weights = energy.masked_fill(~mask, 0.0).cumsum(-1).flatten()
    returns = _rewards_to_go(token_level_rewards, mask)
    rows = Groups.of(index, mask.any(dim=-1))
    cells = Groups((rows.ids.unsqueeze(-1) * mask.shape[1] + positions).flatten(), mask.flatten())
    flat = returns.flatten()
    total_weight = cells.sum(weights)
    baseline = cells.mean(flat, weights) * (total_weight / (total_weight + epsilon))
    baseline = torch.where(total_weight > 0, baseline, cells.mean(flat))
    has_baseline = cells.count() > 1
    if not handle_zero_tail:
        has_baseline = (rows.count() > 1).unsqueeze(-1).expand(mask.shape).flatten()
    advantages = flat - torch.where(has_baseline, baseline, 0.0)
    advantages = advantages.view(mask.shape).masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est("optimal_token_baseline", token_wise=True)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute advantages against the optimal token baseline for single-turn answers.

    A position is a column of the response. Rows are compared where they sampled the same column. Where only
    one row of the group did (the tail of the longest one), the baseline is 0, as in verl. Where all of them
    have W = 0 (the policy was certain so far), the baseline is their plain mean, because there is no gradient
    to weigh. Returns (A, G), both [N, R].

    Without `handle_zero_tail` the last row of a group that goes on has its own returns as baseline there. The
    sum of the weights W is enlarged by `epsilon`, which is 1e-8 in verl.
    """
    refuse_unknown("optimal_token_baseline", others)
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    policy = old_log_probs, sum_pi_squared, rollout_is_weights
    return _against_optimal_baseline(
        token_level_rewards, mask, index, *policy, columns, handle_zero_tail, epsilon
    )


@register_adv_est("tir_optimal_token_baseline", token_wise=True)
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute advantages against the optimal token baseline for tool-integrated reasoning.

    A position is the count of sampled tokens so far. Observations are stepped over, so that rows which read
    documents of different lengths are compared by what they sampled. The rest is as in
    `compute_optimal_token_baseline_advantage`.
    """
    refuse_unknown("tir_optimal_token_baseline", others)
    mask = response_mask.bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    policy = old_log_probs, sum_pi_squared, rollout_is_weights
    return _against_optimal_baseline(
        token_level_rewards, mask, index, *policy, positions, handle_zero_tail, epsilon
    )
