"""Policy losses that hold the ratio of new to old probability near 1 by a clip: PPO, GSPO, GMPO, and SAPO's
soft one.

In all of them r = pi(y_t) / pi_old(y_t) = exp(log_prob - old_log_prob), and where r is 1 their gradient is
that of -A log pi. Log-ratios are limited to [-20, 20] before they are exponentiated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator
from verl.trainer.ppo.algos.policy_losses import clip_range, limited, loss_and_metrics, register_policy_loss


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's per-token loss max(-A r, -A clip(r, 1 - low, 1 + high)), with clip_ratio_c at most -A c where
    A < 0.

    Returns (losses, where the clip removes the gradient, where the dual clip does).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    under_dual_clip = torch.zeros_like(losses, dtype=torch.bool)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        under_dual_clip = (advantages < 0) & (losses > ceiling)
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return losses, clipped > unclipped, under_dual_clip


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
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped policy loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    loss = max(-A r, -A clip(r, 1 - low, 1 + high)); low and high default to `cliprange` (apart: clip-higher,
    DAPO, arXiv:2503.14476). Dual clip (Ye et al. 2019, arXiv:1912.09729, eq. 5): where A < 0 the loss is at
    most -A * clip_ratio_c. `rollout_is_weights` [B, R] multiply the per-token losses.

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
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    losses, is_clipped, under_dual_clip = clipped_surrogate(
        log_ratio.exp(), advantages.masked_fill(~mask, 0.0), low, high, clip_ratio_c
    )
    loss, metrics = loss_and_metrics(
        losses,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        clipped=is_clipped,
        kl=-log_ratio,
        dual=under_dual_clip,
    )
    return loss, metrics["actor/clipped"], metrics["actor/kl"], metrics["actor/dual"]


@register_policy_loss("vanilla", vanishes_with_advantage=True)
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
    low, high = clip_range(config)
    loss, clip_fraction, ppo_kl, dual_fraction = compute_policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        cliprange_low=low,
        cliprange_high=high,
        clip_ratio_c=config["clip_ratio_c"],
        loss_agg_mode=loss_agg_mode,
        denominator=denominator,
        rollout_is_weights=rollout_is_weights,
    )
    metrics = {"actor/pg_clipfrac": clip_fraction, "actor/ppo_kl": ppo_kl}
    if config["clip_ratio_c"] is not None:
        metrics["actor/pg_clipfrac_lower"] = dual_fraction
    return loss, metrics


@register_policy_loss("gspo", vanishes_with_advantage=True)
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: PPO's clip on the ratio of a whole sequence (Zheng et al. 2025, arXiv:2507.18071).

    s_i = exp(mean over the row's sampled tokens of log r). Each token has s_it = sg[s_i] pi / sg[pi], sg: no
    gradient, which is s_i in value and lets tokens have advantages of their own (GSPO-token); with the same
    advantage all over a row the gradient is GSPO's. loss = max(-A s, -A clip(s, 1 - low, 1 + high)).

    Meant for loss_agg_mode seq-mean-token-mean (verl takes that one whatever is configured; here the setting
    counts), and for a small clip range: the paper has clip_ratio_low 3e-4, clip_ratio_high 4e-4.
    """
    mask = response_mask.bool()
    log_prob = log_prob.masked_fill(~mask, 0.0)
    log_ratio = log_prob.detach() - old_log_prob.masked_fill(~mask, 0.0)
    row_mean = log_ratio.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = limited(row_mean + log_prob - log_prob.detach()).exp()
    advantages = advantages.masked_fill(~mask, 0.0)
    losses, is_clipped, _ = clipped_surrogate(ratio, advantages, *clip_range(config))
    return loss_and_metrics(
        losses,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        pg_clipfrac=is_clipped,
        ppo_kl=-limited(log_ratio),
    )


@register_policy_loss("geo_mean", vanishes_with_advantage=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO: the geometric mean of a row's clipped ratios (Zhao et al. 2025, arXiv:2507.20673).

    loss_i = -A_i exp(mean_t c_t) with c_t the log-ratio cut to [-low, high] on the side that the advantage
    pushes to: min(log r, high) where A_i > 0, max(log r, -low) where A_i < 0. A_i is the mean of the row's
    advantages (the paper has one per row). The clip range is one of log-ratios: the paper has 0.4 on both
    sides. A row's rollout weights are taken together by their geometric mean too.

    Meant for loss_agg_mode seq-mean-token-mean, the paper's mean over rows: every token of a row has the
    row's loss. Rows without a sampled token have no part in that mean (in verl they have).
    """
    mask = response_mask.bool()
    low, high = clip_range(config)
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)

    def row_mean(values: Tensor) -> Tensor:
        return values.masked_fill(~mask, 0.0).sum(dim=-1, keepdim=True) / lengths

    advantage = row_mean(advantages)
    log_ratio = (log_prob - old_log_prob).masked_fill(~mask, 0.0)
    cut = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    row_losses = -advantage * limited(row_mean(cut)).exp()
    if rollout_is_weights is not None:
        row_losses = row_losses * row_mean(rollout_is_weights.masked_fill(~mask, 1.0).log()).exp()
    return loss_and_metrics(
        row_losses.expand(mask.shape),
        mask,
        loss_agg_mode,
        denominator,
        pg_clipfrac=(cut != log_ratio) & (advantage != 0),
        ppo_kl=-limited(log_ratio),
    )


@register_policy_loss("sapo", vanishes_with_advantage=True)
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO: a soft gate in place of the clip (Gao et al. 2025, arXiv:2511.20347).

    loss = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg. The gradient is that of
    -A r times 4 p (1 - p), p the sigmoid: 1 at r = 1, less on both sides.

    Meant for loss_agg_mode seq-mean-token-mean (verl takes that one whatever is configured; here the setting
    counts). `actor/sapo_gate` is the mean of 4 p (1 - p): 1 while nothing is held back.
    """
    mask = response_mask.bool()
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    advantages = advantages.masked_fill(~mask, 0.0)
    positive, negative = (advantages.new_tensor(config[key]) for key in ("tau_pos", "tau_neg"))
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return loss_and_metrics(
        -advantages * gate * 4 / tau,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        sapo_gate=4 * gate * (1 - gate),
        ppo_kl=-log_ratio,
    )
