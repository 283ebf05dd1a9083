"""Optimal token baseline: for each position its own baseline, weighted by how much gradient it multiplies.

The Optimal Token Baseline (Li et al. 2026, arXiv:2602.07078). At a position t that several rows i of a group
have reached, with G_t the sum of a row's rewards from t on:

    A_t = G_t - B_t,   B_t = sum_i G_t W_t / sum_i W_t,   W_t = sum over sampled tokens j <= t of rho_j^2 w_j
    w_j = 1 - 2 pi_j + sum over the vocabulary of pi^2    (squared norm of the log-prob's gradient by logits)

W is the energy of the gradient so far, pi_j the probability of the sampled token, rho_j its importance weight
(`rollout_is_weights`; 1 without).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.algos.advantages import AdvantageEstimator, register_adv_est
from verl.trainer.ppo.algos.group_statistics import Groups


def _energy(
    mask: Tensor, old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None
) -> Tensor:
    """[N, R] float64: W at each token."""
    probs = old_log_probs.masked_fill(~mask, 0.0).double().exp()
    energy = 1 - 2 * probs + sum_pi_squared.masked_fill(~mask, 0.0).double()
    energy = energy.clamp(min=0)  # it is at least (1 - pi)^2; float32 probabilities may round below
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.masked_fill(~mask, 0.0).double().square()
    return energy.masked_fill(~mask, 0.0).cumsum(-1)


def _advantages(
    token_level_rewards: Tensor,
    mask: Tensor,
    index: Sequence[Any] | np.ndarray,
    energy: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """(A, G) [N, R]; tokens of a group with equal `positions` [N, R] share a baseline."""
    rewards = token_level_rewards.masked_fill(~mask, 0.0).double()
    returns = rewards.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0.0)
    rows = Groups.of(index, mask.any(dim=-1))
    cells = Groups((rows.ids.unsqueeze(-1) * mask.shape[1] + positions).flatten(), mask.flatten())
    flat, weights = returns.flatten(), energy.flatten()
    baseline = torch.where(cells.sum(weights) > 0, cells.mean(flat, weights), cells.mean(flat))
    advantages = flat - torch.where(cells.count() > 1, baseline, 0.0)
    advantages = advantages.view(mask.shape).masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline for single-turn answers: a position is a column of the response.

    Rows are compared where they sampled the same column. Where only one row of the group did (the tail of the
    longest one), the baseline is 0 as in verl; where all of them have W = 0 (the policy was certain so far)
    it is their plain mean, as there is no gradient to weigh. Returns (A, G), both [N, R].
    """
    mask = response_mask.bool()
    energy = _energy(mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return _advantages(token_level_rewards, mask, index, energy, columns)


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline for tool-integrated reasoning: a position is the count of sampled tokens so far.

    Observations are stepped over, so that rows which read documents of different lengths are compared by
    what they sampled. The rest as in `compute_optimal_token_baseline_advantage`.
    """
    mask = response_mask.bool()
    energy = _energy(mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    return _advantages(token_level_rewards, mask, index, energy, counted)
