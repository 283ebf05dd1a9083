"""Policy losses against the collapse of entropy: tokens whose log-probability and advantage covary strongly
are held back (Cui et al. 2025, arXiv:2505.22617). Which tokens is a matter of the whole mini-batch.

    all rows of the mini-batch --select_*--> bool [N, R] --its rows, as `selection`--> loss of a micro-batch

cov = (A - mean A) (log pi - mean log pi), both means over all sampled tokens of the mini-batch, in float64.
Tokens are told apart by cov, then by column, then by the length of their row: where the rows stand has no
influence. (Rows of a prompt that begin alike have equal tokens there; in the loss they differ at most by the
weight that their row's length gives them.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator
from verl.trainer.ppo.algos.clipped_losses import clipped_surrogate
from verl.trainer.ppo.algos.policy_losses import clip_range, limited, loss_and_metrics, register_policy_loss


def _covariances(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[N, R] float64, -inf where nothing was sampled."""
    spread = [torch.zeros(mask.shape, dtype=torch.float64, device=mask.device) for _ in range(2)]
    for centred, values in zip(spread, (log_prob, advantages), strict=True):
        sampled = values.detach()[mask].double()
        centred[mask] = sampled - sampled.mean()
    return (spread[0] * spread[1]).masked_fill(~mask, -math.inf)


def _by_covariance(candidates: Tensor, covariances: Tensor, mask: Tensor) -> Tensor:
    """Flat indices of the candidates [N, R], greatest covariance first, then leftmost column, then the row
    with the fewest sampled tokens.
    """
    by_length = mask.sum(dim=-1).argsort(stable=True)
    columns, places = candidates[by_length].T.nonzero(as_tuple=True)
    rows = by_length[places]
    order = covariances[rows, columns].argsort(descending=True, stable=True)
    return (rows * candidates.shape[1] + columns)[order]


def _at(flat_indices: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros_like(mask).flatten()
    chosen[flat_indices] = True
    return chosen.view_as(mask)


def _count(share: float, mask: Tensor) -> int:
    """That share of the sampled tokens, rounded down; at least one."""
    return max(1, math.floor(share * int(mask.sum()) + 1e-9))


def select_clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Mapping[str, Any],
    seed: int,
) -> Tensor:
    """Clip-Cov's tokens: a share policy_loss.clip_cov_ratio of the sampled tokens, drawn at random out of
    those with clip_cov_lb < cov < clip_cov_ub that PPO's clip leaves alone. See `SelectFn`.
    """
    mask, settings = response_mask.bool(), config["policy_loss"]
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    _, is_clipped, _ = clipped_surrogate(
        log_ratio.exp(), advantages.masked_fill(~mask, 0.0), *clip_range(config)
    )
    covariances = _covariances(log_prob, advantages, mask)
    within = (covariances > settings["clip_cov_lb"]) & (covariances < settings["clip_cov_ub"])
    indices = _by_covariance(within & mask & ~is_clipped, covariances, mask)
    drawn = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
    drawn = drawn[: _count(settings["clip_cov_ratio"], mask)]
    return _at(indices[drawn.to(indices.device)], mask)


def select_kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Mapping[str, Any],
    seed: int,
) -> Tensor:
    """KL-Cov's tokens: the share policy_loss.kl_cov_ratio of the sampled tokens with the greatest cov. See
    `SelectFn`.
    """
    mask = response_mask.bool()
    indices = _by_covariance(mask, _covariances(log_prob, advantages, mask), mask)
    return _at(indices[: _count(config["policy_loss"]["kl_cov_ratio"], mask)], mask)


@register_policy_loss("clip_cov", select=select_clip_cov, vanishes_with_advantage=True)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    selection: Tensor,
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss, and 0 for the chosen tokens.

    (verl chooses in each micro-batch by itself, so that its loss depends on the split.)
    `actor/pg_clipfrac` is the share of tokens that PPO's clip holds, `actor/cov_share` that of the chosen.
    """
    mask = response_mask.bool()
    chosen = selection & mask
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    losses, is_clipped, _ = clipped_surrogate(
        log_ratio.exp(), advantages.masked_fill(~mask, 0.0), *clip_range(config)
    )
    return loss_and_metrics(
        losses.masked_fill(chosen, 0.0),
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        pg_clipfrac=is_clipped,
        cov_share=chosen,
        ppo_kl=-log_ratio,
    )


@register_policy_loss("kl_cov", select=select_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    selection: Tensor,
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov (arXiv:2505.22617): loss = -A r, and for the chosen tokens + ppo_kl_coef |log r|.

    The distance is |log r| as in the authors' code and in verl: unlike an unbiased estimate of the KL it
    draws each of these few tokens back to the old policy, wherever it went. There is no clip.
    `actor/cov_share` is the share of chosen tokens, `actor/ppo_kl_abs` the mean of |log r| over all.
    """
    mask = response_mask.bool()
    chosen = selection & mask
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    penalty = config["policy_loss"]["ppo_kl_coef"] * log_ratio.abs()
    losses = -advantages.masked_fill(~mask, 0.0) * log_ratio.exp() + penalty.masked_fill(~chosen, 0.0)
    return loss_and_metrics(
        losses,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        cov_share=chosen,
        ppo_kl=-log_ratio,
        ppo_kl_abs=log_ratio.abs(),
    )
