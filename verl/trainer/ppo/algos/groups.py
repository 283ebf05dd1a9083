"""Advantages of whole trajectories, relative to the others of their group (one prompt of one step)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.algos.advantages import AdvantageEstimator, register_adv_est


class _Groups(NamedTuple):
    """Outcome scores and statistics of each row's group, [N]; rows without a sampled token count nowhere."""

    scores: Tensor
    counts: Tensor
    means: Tensor
    stds: Tensor  # unbiased; 1 where the group has one row


def _group_statistics(
    token_level_rewards: Tensor, mask: Tensor, index: Sequence[Any] | np.ndarray
) -> _Groups:
    """Sums each row's rewards over its sampled tokens and takes count, mean and unbiased std of each uid's
    rows.
    """
    if len(index) != len(mask):
        raise ValueError(
            f"index must name the group of each of the {len(mask)} rows, found {len(index)} entries."
        )
    scores = token_level_rewards.masked_fill(~mask, 0.0).sum(dim=-1)
    group_of = torch.from_numpy(np.unique(np.asarray(index), return_inverse=True)[1].reshape(-1)).to(
        mask.device
    )
    taken = mask.any(dim=-1).to(scores.dtype)

    def group_sum(x: Tensor) -> Tensor:
        return scores.new_zeros(len(scores)).index_add(0, group_of, x * taken)[group_of]

    counts = group_sum(torch.ones_like(scores))
    means = group_sum(scores) / counts.clamp(min=1)
    variances = group_sum((scores - means).square()) / (counts - 1).clamp(min=1)
    return _Groups(scores, counts, means, torch.where(counts > 1, variances.sqrt(), 1.0))


def _broadcast(row_advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Gives every sampled token of a row the row's advantage; the returns are the same numbers."""
    advantages = row_advantages.unsqueeze(-1).expand(mask.shape).masked_fill(~mask, 0.0)
    return advantages, advantages.clone()


@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO with outcome rewards (Shao et al. 2024, arXiv:2402.03300, 4.1.2): A = (score - mean) / (std +
    epsilon).

    score is the sum of a row's rewards, mean and unbiased std are over the rows with the same `index` (the
    uid of one prompt of one step). `norm_adv_by_std_in_grpo=False` leaves out the division (Dr. GRPO, Liu
    et al. 2025, arXiv:2503.20783). A group of one row has mean 0 and std 1: its score is its advantage.
    """
    mask = response_mask.bool()
    groups = _group_statistics(token_level_rewards, mask, index)
    centred = groups.scores - torch.where(groups.counts > 1, groups.means, 0.0)
    return _broadcast(centred / (groups.stds + epsilon) if norm_adv_by_std_in_grpo else centred, mask)


@register_adv_est(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any] | np.ndarray
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

    A = score - mean score of the *other* rows of the group = n / (n - 1) * (score - mean). A group of one row
    has no baseline: its score is its advantage.
    """
    mask = response_mask.bool()
    groups = _group_statistics(token_level_rewards, mask, index)
    left_out = (groups.scores - groups.means) * groups.counts / (groups.counts - 1).clamp(min=1)
    return _broadcast(torch.where(groups.counts > 1, left_out, groups.scores), mask)
