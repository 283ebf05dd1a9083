"""Advantages of whole trajectories, relative to the others of their group (one prompt of one step).

A row's score is the sum of its rewards over its sampled tokens. Each of its sampled tokens gets the row's
advantage, and the returns are the same numbers. Three rules hold for all of these estimators:

- Rows without a sampled token count nowhere.
- A group whose scores are all equal has advantages of exactly 0 (before a normalisation over the batch).
- A row that is alone in its group has nothing to be compared with. Its score is its advantage, as in verl
  (whose grpo_passk refuses such a group).

The functions take verl's keywords. As in verl, `config` counts only where a docstring says so, `epsilon` only
where its formula has it, and `others` may hold what a trainer passes to every estimator (`refuse_unknown`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages import (
    Groups,
    expand_to_tokens,
    outcome_scores,
    refuse_unknown,
    register_adv_est,
)
from verl.algos.aggregation import masked_whiten
from verl.algos.registry import config_value

Index = Sequence[Any] | np.ndarray


def _grouped(token_level_rewards: Tensor, mask: Tensor, index: Index) -> tuple[Tensor, Groups]:
    """Return the scores [N] float64, and the groups of the rows that sampled something."""
    return outcome_scores(token_level_rewards, mask), Groups.of(index, mask.any(dim=-1))


@register_adv_est("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute GRPO's advantages from outcome rewards: A = (score - mean) / (std + epsilon).

    This is section 4.1.2 of Shao et al. 2024, arXiv:2402.03300. The mean and the unbiased std are over the
    rows with the same `index` (the uid of one prompt of one step). `norm_adv_by_std_in_grpo=False` leaves out
    the division (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). A group of one row has mean 0 and std 1.
    """
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    advantages = groups.centred(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    return expand_to_tokens(advantages, mask, token_level_rewards.dtype)


@register_adv_est("grpo_vectorized")
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute GRPO's advantages, under the name of verl's faster form of `compute_grpo_outcome_advantage`."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )


@register_adv_est("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute advantages for pass@k, which credit only the best row of a group.

    The method is that of Tang et al. 2025, arXiv:2503.19595. A = (r_max - r_second) / (std + epsilon) for the
    best row and 0 for the others. This is what the group's best score would lose without that row. The
    division is left out unless `norm_adv_by_std_in_grpo` is set. If two best rows are equal, both get 0. As
    in verl, a `config` that has norm_adv_by_std_in_grpo decides.
    """
    refuse_unknown("grpo_passk", others)
    if config is not None:
        name = "norm_adv_by_std_in_grpo"
        norm_adv_by_std_in_grpo = config_value(config, name, "grpo_passk", norm_adv_by_std_in_grpo)
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    best = groups.max(scores)
    is_best = groups.is_counted & (scores == best)
    second = Groups(groups.ids, groups.is_counted & ~is_best).max(scores)
    alone = groups.count() == 1
    gain = torch.where(alone, scores, best - second)
    credited = alone | (is_best & (groups.sum(is_best) == 1))
    advantages = torch.where(credited & groups.is_counted, gain, 0.0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    return expand_to_tokens(advantages, mask, token_level_rewards.dtype)


@register_adv_est("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

    A = score - mean score of the *other* rows of the group = n / (n - 1) * (score - mean).
    """
    refuse_unknown("rloo", others)
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    count = groups.count()
    scale = torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)
    return expand_to_tokens(scale * groups.centred(scores), mask, token_level_rewards.dtype)


@register_adv_est("rloo_vectorized")
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of `compute_rloo_outcome_advantage`, but 0 for a row that is alone in its group.

    In verl this is the faster form of that function, with this difference.
    """
    refuse_unknown("rloo_vectorized", others)
    mask = response_mask.bool()
    is_alone = Groups.of(index, mask.any(dim=-1)).count() == 1
    advantages, _ = compute_rloo_outcome_advantage(token_level_rewards, response_mask, index)
    advantages = advantages.masked_fill(is_alone.unsqueeze(-1), 0.0)
    return advantages, advantages.clone()


@register_adv_est("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of REINFORCE++ with a baseline (Hu et al. 2025, arXiv:2501.03262).

    They are differences from the group's mean, whitened over the sampled tokens of the batch:
    A = (d - mean(d)) / sqrt(var(d) + 1e-8), d = score - mean of the group. The mean and the unbiased variance
    are over all sampled tokens. A group of equal scores has d = 0, from which only the batch's mean is
    subtracted.
    """
    refuse_unknown("reinforce_plus_plus_baseline", others)
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    differences, _ = expand_to_tokens(groups.centred(scores), mask, torch.float64)
    advantages = masked_whiten(differences, mask).to(token_level_rewards.dtype)
    return advantages, advantages.clone()


@register_adv_est("opo")
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of OPO, on-policy RL with the optimal reward baseline.

    The method is that of Hao et al. 2025, arXiv:2505.23585. A = score - sum(l * score) / sum(l) over the
    group, where l is the number of tokens that the row sampled. This is the baseline of least variance if a
    row's squared gradient grows with its length.
    """
    refuse_unknown("opo", others)
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    baseline = groups.mean(scores, weights=mask.sum(dim=-1))
    advantages = scores - torch.where(groups.count() > 1, baseline, 0.0)
    return expand_to_tokens(advantages, mask, token_level_rewards.dtype)


@register_adv_est("gpg")
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of GPG, group policy gradient (Chu et al. 2025, arXiv:2504.02546).

    A = alpha * (score - mean) / f_norm. alpha = B / (B - M) makes up for the M of the batch's B rows whose
    groups are all right or all wrong and add nothing to the gradient. (verl divides B by the number of rows
    with a score other than 0. It thereby takes groups that are all right for groups that add something, and
    wrong rows of mixed groups for rows that add nothing.) As in verl, the argument `alpha` has no effect.
    """
    refuse_unknown("gpg", others)
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    advantages = groups.centred(scores)
    adds = groups.is_counted & (groups.max(advantages.abs()) > 0)
    rescale = groups.is_counted.sum().double() / adds.sum().clamp(min=1)
    return expand_to_tokens(rescale * advantages / f_norm, mask, token_level_rewards.dtype)


@register_adv_est("maxrl")
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of MaxRL, maximum likelihood RL.

    This is algorithm 1 of Tajwar, Zeng et al. 2026, arXiv:2602.02710. A = (score - mean) / mean over the
    group, 0 where no row has a score. With n rows and scores of 0 and 1 the expected gradient is that of log
    p, where p is the chance of a right answer, cut off after n - 1 terms of the series -sum over k of (1 -
    p)^k / k. (The paper has n terms, without the control variate.) A group of one row is plain REINFORCE, the
    first term.

    Raises ValueError if a score is negative, because the mean stands for a probability.
    """
    mask = response_mask.bool()
    scores, groups = _grouped(token_level_rewards, mask, index)
    if bool((scores[groups.is_counted] < 0).any()):
        raise ValueError(
            f"maxrl divides by the group's mean score and needs scores of 0 or more, found "
            f"{float(scores[groups.is_counted].min()):g}. Take penalties (and a KL) out of the reward, or "
            "choose algorithm.adv_estimator=grpo."
        )
    mean = groups.mean(scores)
    scale = torch.where((groups.count() > 1) & (mean > 0), mean, 1.0)
    return expand_to_tokens(groups.centred(scores) / scale, mask, token_level_rewards.dtype)


@register_adv_est("gdpo", needs=("reward_components",))
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
    reward_components: Mapping[str, Tensor] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of GDPO, group reward-decoupled normalisation.

    The method is that of Liu et al. 2026, arXiv:2601.05242. Each of several rewards is compared within its
    group on its own scale. A_k = (r_k - mean) / (std + epsilon) for each component; S = sum of weight_k *
    A_k; A = (S - mean(S)) / (std(S) + epsilon) over the rows of the batch that sampled something. (verl takes
    this last mean over tokens, so that long rows count for more.)

    The components [N] are the whole reward. They are `reward_components`. As in verl, they may instead be the
    columns of `non_tensor_batch` that config.gdpo_reward_keys names, weighted by config.gdpo_reward_weights
    in the same order (null: 1 each), and if there are none of both the scores are the only component.
    `token_level_rewards`, and with it a KL in the reward, is used only then. `batch` is not read.

    Raises ValueError if there is no component, or if weights and components do not fit.
    """
    refuse_unknown("gdpo", others)
    if reward_components is None:
        reward_components, reward_weights = _verl_components(
            token_level_rewards, response_mask, config, non_tensor_batch
        )
    mask = response_mask.bool()
    weights = reward_weights or {}
    unknown = set(weights) - set(reward_components)
    if not reward_components or unknown:
        raise ValueError(
            f"gdpo needs the rewards that it weighs: found {sorted(reward_components) or 'none'}, with "
            f"weights for {sorted(weights) or 'none'}."
        )
    groups = Groups.of(index, mask.any(dim=-1))
    total = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    for name, component in reward_components.items():
        component = component.double()
        advantages = groups.centred(component)
        if norm_adv_by_std_in_grpo:
            advantages = advantages / (groups.std(component) + epsilon)
        total = total + weights.get(name, 1.0) * advantages
    batch_group = Groups(torch.zeros_like(groups.ids), groups.is_counted)
    mean = batch_group.mean(total)
    std = batch_group.std(total)
    # The advantages of each group add up to 0. The rounding error of that sum must not reach groups whose
    # advantages are all 0.
    mean = torch.where(mean.abs() > 1e-12 * std, mean, 0.0)
    return expand_to_tokens((total - mean) / (std + epsilon), mask, torch.float32)


def _verl_components(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, columns: Mapping[str, Any] | None
) -> tuple[dict[str, Tensor], dict[str, float] | None]:
    """Return the components and weights of GDPO that verl's arguments describe."""
    if config is None or columns is None:
        return {"score": outcome_scores(token_level_rewards, response_mask.bool())}, None
    keys = config_value(config, "gdpo_reward_keys", "gdpo")
    weights = config_value(config, "gdpo_reward_weights", "gdpo", None)
    if not keys or any(key not in columns for key in keys):
        raise ValueError(
            f"gdpo: found gdpo_reward_keys={keys} and the columns {sorted(columns)}; expected the names of "
            "rewards that are columns of non_tensor_batch."
        )
    if weights is not None and len(weights) != len(keys):
        raise ValueError(f"gdpo: found {len(weights)} gdpo_reward_weights for {len(keys)} gdpo_reward_keys.")
    components = {
        key: torch.as_tensor(np.asarray(columns[key], dtype=np.float64), device=response_mask.device)
        for key in keys
    }
    return components, None if weights is None else dict(zip(keys, weights, strict=True))


def thrift_advantages(
    solved: Tensor, num_searches: Tensor, groups: Groups, solved_share: float, epsilon: float = 1e-6
) -> Tensor:
    """Return what a right answer gets for fewer searches than the others to its question, [N] float64.

    Among the solved rows of a group A = max(0, (mean - searches) / (std + epsilon)), times the square of
    `solved_share`. All other rows have 0. This has four consequences:

    - A short way to an answer counts the same whether or not other rows of the group are wrong. - No right
      answer is punished. - A group without a right answer has 0, whatever its scores are. - Hardly anything
      counts as long as few questions are answered, when nobody knows yet which searches are too many.

    Arora and Zanette 2025 (arXiv:2502.04463) also compare right answers only. They compare lengths and put
    the comparison into the reward, where it is divided once more by the group's standard deviation.

    Args:
        solved: [N] bool, whether the row is right. A score does not say it, because it may be for a format.
        num_searches: [N] int.
        groups: the rows of one question, without those that are not learnt from.
        solved_share: in [0, 1], the share of solved rows among all rows that may search and that the step
            generated, including those that are not in `groups`.
        epsilon: added to the standard deviation.
    """
    solved_groups = Groups(groups.ids, groups.is_counted & solved)
    searches = num_searches.double()
    relative_saving = (solved_groups.mean(searches) - searches) / (solved_groups.std(searches) + epsilon)
    return torch.where(solved_groups.is_counted, relative_saving.clamp(min=0.0) * solved_share**2, 0.0)
