"""Policy losses by name; PPO's own.

    log_prob, old_log_prob, advantages, response_mask, ... --loss--> scalar, metrics

A registered loss names as parameters what it needs out of those of `policy_loss`. It returns the loss of its
rows and a dictionary of metrics; each of these numbers is a sum divided by `denominator`, so the numbers of
the micro-batches add up to those of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LOG_RATIO_LIMIT, LossDenominator, agg_loss
from verl.trainer.ppo.algos.registry import Registry, call_with

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: gives a name to a policy loss, for `actor.policy_loss.loss_mode`."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered under a name, or at an import path `package.module:function`."""
    return POLICY_LOSSES.get(name)


def policy_loss(
    loss_mode: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    denominator: LossDenominator,
    rollout_is_weights: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
    teacher_log_prob: Tensor | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of the named loss, called with those arguments that it asks for.

    Args:
        log_prob, old_log_prob, advantages: [B, R] float32; response_mask: [B, R], 1 where the policy sampled.
        config: the `actor_rollout_ref.actor` block. denominator: counts of the whole mini-batch.
        rollout_is_weights: [B, R] detached importance weights of `algorithm.rollout_correction`, if it is on.
        rollout_log_prob: [B, R], the rollout engine's own. teacher_log_prob: [B, R], for distillation.
        selection: [B, R] bool, tokens that the loss chose out of the whole mini-batch (`clip_cov`, `kl_cov`).
    """
    available = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "loss_agg_mode": loss_agg_mode,
        "config": config,
        "denominator": denominator,
        "rollout_is_weights": rollout_is_weights,
        "rollout_log_prob": rollout_log_prob,
        "teacher_log_prob": teacher_log_prob,
        "selection": selection,
    }
    loss, metrics = call_with(get_policy_loss_fn(loss_mode), available, f"Policy loss {loss_mode!r}")
    return loss, metrics


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float | None = None,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped policy loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    With r = exp(log_prob - old_log_prob): loss = max(-A r, -A clip(r, 1 - low, 1 + high)); low and high
    default to `cliprange` (apart: clip-higher, DAPO, arXiv:2503.14476). Dual clip (Ye et al. 2019,
    arXiv:1912.09729, eq. 5): where A < 0 the loss is at most -A * clip_ratio_c. The log-ratio is limited
    to [-20, 20] before exp.

    Returns four scalars: loss; clip fraction (tokens whose gradient the clip removes); ppo_kl, the mean of
    old_log_prob - log_prob; fraction of tokens under the dual clip. The last three are token means.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(
            f"clip_ratio_c: found {clip_ratio_c}, expected a number greater than 1, or null for no dual clip."
        )
    mask = response_mask.bool()
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    advantages = advantages.masked_fill(~mask, 0.0)
    negative_kl = (log_prob - old_log_prob).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = negative_kl.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    under_dual_clip = torch.zeros_like(mask)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        under_dual_clip = (advantages < 0) & (losses > ceiling)
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    clip_fraction = agg_loss((clipped > unclipped).float(), mask, "token-mean", denominator)
    ppo_kl = agg_loss(-negative_kl.detach(), mask, "token-mean", denominator)
    dual_fraction = agg_loss(under_dual_clip.float(), mask, "token-mean", denominator)
    return agg_loss(losses, mask, loss_agg_mode, denominator), clip_fraction, ppo_kl, dual_fraction


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`compute_policy_loss` with the clip range of the `actor` block; see there."""
    loss, clip_fraction, ppo_kl, dual_fraction = compute_policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        config["clip_ratio"],
        config["clip_ratio_low"],
        config["clip_ratio_high"],
        config["clip_ratio_c"],
        loss_agg_mode,
        denominator,
    )
    metrics = {"actor/pg_clipfrac": clip_fraction, "actor/ppo_kl": ppo_kl}
    if config["clip_ratio_c"] is not None:
        metrics["actor/pg_clipfrac_lower"] = dual_fraction
    return loss, metrics
