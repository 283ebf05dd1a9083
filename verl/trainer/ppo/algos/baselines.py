"""Advantages against a baseline from outside of the batch: a greedy answer, or a mean kept over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.algos.advantages import AdvantageEstimator, register_adv_est
from verl.trainer.ppo.algos.group_statistics import Groups, outcome_scores, spread


@register_adv_est(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv:2310.10505): the greedy answer's score is the baseline.

    A_t = G_t - b, G_t the sum of the rewards from sampled token t on, b the row's `reward_baselines` [N].
    Returns (A, G).
    """
    mask = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~mask, 0.0).double()
    returns = rewards.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0.0)
    advantages = (returns - reward_baselines.double().unsqueeze(-1)).masked_fill(~mask, 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


class RunningBaseline:
    """A running mean of scores for each key (a data source, or data source and role), kept over steps.

    b <- decay^n * b + (1 - decay^n) * mean for n new scores with that mean: the exponential moving average of
    n updates, in whatever order the rows stand. A key that is new starts at 0.

    Args:
        decay: what is left of the old value after one score, in [0, 1).

    Attributes:
        values: key -> the running mean.
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"The decay of a running baseline must be in [0, 1), found {decay}.")
        self.decay = decay
        self.values: dict[str, float] = {}

    def baselines(self, keys: Sequence[str] | np.ndarray) -> Tensor:
        """[N] float64: the running mean of each row's key."""
        return torch.tensor([self.values.get(str(key), 0.0) for key in keys], dtype=torch.float64)

    def update(
        self, token_level_rewards: Tensor, response_mask: Tensor, baseline_keys: Sequence[str] | np.ndarray
    ) -> None:
        """Takes in the scores of a step: rewards [N, R] summed over the sampled tokens of each row.

        To be called once for each step, after its advantages. Rows without a sampled token don't count.
        """
        mask = response_mask.bool()
        keys = [str(key) for key in baseline_keys]
        scores, groups = outcome_scores(token_level_rewards, mask), Groups.of(keys, mask.any(dim=-1))
        means, counts = groups.mean(scores).tolist(), groups.count().tolist()
        new = {}
        for key, mean, count in zip(keys, means, counts, strict=True):
            kept = self.decay**count
            if count:
                new[key] = kept * self.values.get(key, 0.0) + (1 - kept) * mean
        self.values |= new

    def state_dict(self) -> dict[str, Any]:
        """The running means; plain JSON."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = {str(key): float(value) for key, value in state["values"].items()}


@register_adv_est(AdvantageEstimator.RAE)
def compute_rae_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    running_baseline: RunningBaseline,
    baseline_keys: Sequence[str] | np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119): A = score - b.

    b is the running mean of the row's `baseline_keys` [N] from the steps before: it does not depend on the
    scores that it is taken off, so the gradient stays unbiased. (The paper writes the update first; its code
    and prime-rl do as here.) Needs no groups. Afterwards call `running_baseline.update` with these rewards.
    """
    mask = response_mask.bool()
    if len(baseline_keys) != len(mask):
        raise ValueError(
            f"baseline_keys must name the running mean of each of the {len(mask)} rows, found "
            f"{len(baseline_keys)} entries."
        )
    baselines = running_baseline.baselines(baseline_keys).to(mask.device)
    return spread(outcome_scores(token_level_rewards, mask) - baselines, mask, token_level_rewards.dtype)
