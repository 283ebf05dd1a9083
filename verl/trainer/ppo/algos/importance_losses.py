"""Policy losses that weight the score function by the ratio of new to old probability, or not at all, with no
clip on the surrogate: plain importance sampling, GPG, CISPO, AIPO, IPO, DPPO, DRO.

In all of them r = pi(y_t) / pi_old(y_t) = exp(log_prob - old_log_prob), limited to [e^-20, e^20]; sg[x] is x
without gradient. Where r is 1 their gradient is that of -A log pi. The papers on asynchronous training have
the sampling engine's probabilities in the place of pi_old: with `algorithm.rollout_correction.bypass_mode`
that is what old_log_prob holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator
from verl.trainer.ppo.algos.policy_losses import clip_range, limited, loss_and_metrics, register_policy_loss


@register_policy_loss("importance_sampling", vanishes_with_advantage=True)
def compute_policy_loss_importance_sampling(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = -A r: the policy gradient from samples of an older policy, per token; nothing bounds r."""
    mask = response_mask.bool()
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    losses = -advantages.masked_fill(~mask, 0.0) * log_ratio.exp()
    return loss_and_metrics(losses, mask, loss_agg_mode, denominator, rollout_is_weights, ppo_kl=-log_ratio)


@register_policy_loss("gpg", vanishes_with_advantage=True)
def compute_policy_loss_gpg(
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    old_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546): loss = -A log pi, no ratio.

    The paper's factor for groups of equal rewards belongs to the advantages (adv_estimator gpg).
    old_log_prob is used for the metric `actor/ppo_kl` alone, which is left out without it.
    """
    mask = response_mask.bool()
    log_prob = log_prob.masked_fill(~mask, 0.0)
    metrics: dict[str, Tensor] = {}
    if old_log_prob is not None:
        metrics["ppo_kl"] = limited(old_log_prob.masked_fill(~mask, 0.0) - log_prob)
    losses = -advantages.masked_fill(~mask, 0.0) * log_prob
    return loss_and_metrics(losses, mask, loss_agg_mode, denominator, rollout_is_weights, **metrics)


@register_policy_loss("cispo", vanishes_with_advantage=True)
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1, arXiv:2506.13585): the weight is clipped, but every token keeps a gradient.

    loss = -sg[clip(r, 1 - low, 1 + high)] A log pi. The paper sets no lower bound (clip_ratio_low=1).
    `actor/pg_clipfrac` is the share of tokens whose weight was clipped.
    """
    mask = response_mask.bool()
    low, high = clip_range(config)
    log_prob = log_prob.masked_fill(~mask, 0.0)
    log_ratio = limited(log_prob.detach() - old_log_prob.masked_fill(~mask, 0.0))
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return loss_and_metrics(
        -weight * advantages.masked_fill(~mask, 0.0) * log_prob,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        pg_clipfrac=weight != ratio,
        ppo_kl=-log_ratio,
    )


@register_policy_loss("aipo", vanishes_with_advantage=True)
def compute_policy_loss_aipo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """AIPO (LlamaRL, arXiv:2505.24034): the ratio is cut from above alone.

    loss = -sg[min(r, rho)] A log pi with rho = policy_loss.aipo_max_ratio.
    `actor/pg_clipfrac` is the share of tokens whose ratio was cut.
    """
    mask = response_mask.bool()
    log_prob = log_prob.masked_fill(~mask, 0.0)
    log_ratio = limited(log_prob.detach() - old_log_prob.masked_fill(~mask, 0.0))
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=config["policy_loss"]["aipo_max_ratio"])
    return loss_and_metrics(
        -weight * advantages.masked_fill(~mask, 0.0) * log_prob,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        pg_clipfrac=weight != ratio,
        ppo_kl=-log_ratio,
    )


@register_policy_loss("ipo")
def compute_policy_loss_ipo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """IPO, INTELLECT policy optimization (the default loss of prime-rl): tokens whose probability moved too
    far, up or down, whatever the sign of the advantage, are left out.

    loss = -[|pi - pi_old| <= eps] A r + kl_tau (log r)^2, eps = policy_loss.ipo_eps (a difference of
    probabilities) and kl_tau = policy_loss.ipo_kl_tau; the second term (Kimi K2.5, arXiv:2602.02276) holds
    for the left-out tokens too. `actor/pg_clipfrac` is the share of left-out tokens.
    """
    mask = response_mask.bool()
    settings = config["policy_loss"]
    log_prob, old_log_prob = (x.masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob))
    log_ratio = limited(log_prob - old_log_prob)
    left_out = (log_prob.detach().exp() - old_log_prob.exp()).abs() > settings["ipo_eps"]
    surrogate = (-advantages.masked_fill(~mask, 0.0) * log_ratio.exp()).masked_fill(left_out, 0.0)
    return loss_and_metrics(
        surrogate + settings["ipo_kl_tau"] * log_ratio.square(),
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        pg_clipfrac=left_out,
        ppo_kl=-log_ratio,
    )


def _divergence_masked(
    left_out: Tensor,
    log_prob: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: Mapping[str, Any],
    loss_agg_mode: str,
    denominator: LossDenominator | None,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO's loss but for which tokens are left out."""
    ratio, ceiling = log_ratio.exp(), config["clip_ratio_c"]
    weight = ratio if ceiling is None else ratio.clamp(max=ceiling)
    metrics = {"pg_clipfrac": left_out, "ppo_kl": -log_ratio}
    if ceiling is not None:
        metrics["pg_clipfrac_lower"] = (ratio > ceiling) & ~left_out
    losses = (-weight * advantages * log_prob).masked_fill(left_out, 0.0)
    return loss_and_metrics(losses, mask, loss_agg_mode, denominator, rollout_is_weights, **metrics)


@register_policy_loss("dppo_tv", vanishes_with_advantage=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879).

    loss = -M sg[min(r, c)] A log pi; M = 0 where the update would lead further away from pi_old than it
    already is: A > 0 and pi - pi_old > high, or A < 0 and pi_old - pi > low. As in verl the actor block's
    clip range holds the bounds, here differences of probabilities, and clip_ratio_c the greatest ratio (the
    paper: a large one, 20, if any). `actor/pg_clipfrac` is the share of tokens with M = 0,
    `actor/pg_clipfrac_lower` that of tokens whose ratio was cut.
    """
    mask = response_mask.bool()
    low, high = clip_range(config)
    log_prob, old_log_prob, advantages = (
        x.masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob, advantages)
    )
    moved = log_prob.detach().exp() - old_log_prob.exp()
    left_out = torch.where(advantages > 0, moved > high, (advantages < 0) & (moved < -low))
    log_ratio = limited(log_prob.detach() - old_log_prob)
    return _divergence_masked(
        left_out,
        log_prob,
        log_ratio,
        advantages,
        mask,
        config,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
    )


@register_policy_loss("dppo_kl", vanishes_with_advantage=True)
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with the binary KL (Qi et al. 2026, arXiv:2602.04879); as `dppo_tv` but for the distance.

    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), p = pi and q = pi_old of the sampled token (nats).
    M = 0 where D > high, A > 0 and p > q, and where D > low, A < 0 and p < q.
    """
    mask = response_mask.bool()
    low, high = clip_range(config)
    log_prob, old_log_prob, advantages = (
        x.masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob, advantages)
    )
    new, old = log_prob.detach().clamp(max=0.0), old_log_prob.clamp(max=0.0)
    others_new, others_old = (-torch.expm1(x) for x in (new, old))
    others = others_old * (others_old.clamp(min=1e-8).log() - others_new.clamp(min=1e-8).log())
    divergence = old.exp() * (old - new) + others
    too_high = (advantages > 0) & (new > old) & (divergence > high)
    too_low = (advantages < 0) & (new < old) & (divergence > low)
    log_ratio = limited(log_prob.detach() - old_log_prob)
    return _divergence_masked(
        too_high | too_low,
        log_prob,
        log_ratio,
        advantages,
        mask,
        config,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
    )


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DRO, direct reward optimisation: least squares in the place of a ratio (Richemond et al. 2024,
    arXiv:2405.19107; Kimi k1.5, arXiv:2501.12599, its policy optimization).

    Of a row with advantage A and log-ratio rho = sum_t log r: (A - beta rho)^2 / (2 beta), beta =
    policy_loss.dro_beta, but for A^2 / (2 beta), which has no gradient: -A rho + beta rho^2 / 2. Token t
    bears log r_t (-A_t + beta rho / 2) of it. The papers centre the rewards by a value or the group's mean:
    that is the advantage, best left undivided (norm_adv_by_std_in_grpo=false).

    Meant for loss_agg_mode seq-mean-token-sum, the papers' mean over rows. `actor/dro_penalty` is the second
    term's share of the loss, as a token mean.
    """
    mask = response_mask.bool()
    log_ratio = limited((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    of_row = log_ratio.sum(dim=-1, keepdim=True)
    penalty = config["policy_loss"]["dro_beta"] / 2 * of_row * log_ratio
    return loss_and_metrics(
        penalty - advantages.masked_fill(~mask, 0.0) * log_ratio,
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        dro_penalty=penalty,
        ppo_kl=-log_ratio,
    )
