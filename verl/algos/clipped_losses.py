"""Policy losses that hold the ratio r near 1, and Clip-Cov and KL-Cov.

PPO's clip, GSPO, GMPO and SAPO's soft gate hold the ratio. Clip-Cov and KL-Cov hold back the few tokens that
cause the collapse of the entropy (Cui et al. 2025, arXiv:2505.22617).

Where r is 1 their gradient is that of -A log pi. For symbols, mask and aggregation see `policy_losses`.

Clip-Cov and KL-Cov choose tokens out of the whole mini-batch:

    all rows of the mini-batch --select_*--> bool [N, R] --its rows, as `selection`--> loss of a micro-batch

They choose by cov = (A - mean A) (log pi - mean log pi), with both means over all sampled tokens of the
mini-batch, in float64. Ties of cov are broken by the column, then by the length of the row, so the order of
the rows has no influence. (Rows of a prompt that begin alike have equal tokens there. In the loss these
differ at most by the weight that their row's length gives them.)
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verl.algos.aggregation import LossDenominator
from verl.algos.policy_losses import CLIP_RANGE, TokenLosses, clamp_log_ratio, clip_range, token_loss


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute PPO's per-token loss max(-A r, -A clip(r, 1 - low, 1 + high)).

    This is equation 7 of Schulman et al. 2017, arXiv:1707.06347. With the dual clip (Ye et al. 2019,
    arXiv:1912.09729, eq. 5) the loss is at most -A * clip_ratio_c where A < 0.

    Returns:
        (losses, where the clip removes the gradient, where the dual clip removes it).
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(
            f"clip_ratio_c: found {clip_ratio_c}, expected a number greater than 1, or null for no dual clip."
        )
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    under_dual_clip = torch.zeros_like(losses, dtype=torch.bool)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        under_dual_clip = (advantages < 0) & (losses > ceiling)
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return losses, clipped > unclipped, under_dual_clip


@token_loss("vanilla", vanishes_with_advantage=True, reads=(*CLIP_RANGE, "clip_ratio_c"))
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of PPO: `clipped_surrogate` with the clip range of the `actor` block.

    The low and the high bound may differ (clip-higher, DAPO, arXiv:2503.14476).

    `actor/pg_clipfrac` is the share of tokens whose gradient the clip removes. `actor/pg_clipfrac_lower` is
    the share of those under the dual clip, if the dual clip is on.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    losses, is_clipped, under_dual_clip = clipped_surrogate(
        log_ratio.exp(), advantages, *clip_range(config), config.clip_ratio_c
    )
    metrics = {"pg_clipfrac": is_clipped, "ppo_kl": -log_ratio}
    if config.clip_ratio_c is not None:
        metrics["pg_clipfrac_lower"] = under_dual_clip
    return TokenLosses(losses, metrics)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `compute_policy_loss_vanilla` with its settings as arguments, for users.

    The dual clip is on by default here, as in verl. In the configuration `actor.clip_ratio_c` is null.

    Returns:
        Four scalars: the loss; the clip fraction (tokens whose gradient the clip removes); ppo_kl, the mean
        of old_log_prob - log_prob; the fraction of tokens under the dual clip. The last three are token
        means.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError(
            f"compute_policy_loss: found cliprange={cliprange}, cliprange_low={cliprange_low} and "
            f"cliprange_high={cliprange_high}; expected cliprange, or both of the others."
        )
    config = SimpleNamespace(
        clip_ratio_low=low, clip_ratio_high=high, clip_ratio=None, clip_ratio_c=clip_ratio_c
    )
    batch = old_log_prob, log_prob, advantages, response_mask
    loss, metrics = compute_policy_loss_vanilla(*batch, loss_agg_mode, config, denominator=denominator)
    names = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    clip_fraction, ppo_kl, dual = (metrics.get(f"actor/{name}", torch.zeros_like(loss)) for name in names)
    return loss, clip_fraction, ppo_kl, dual


@token_loss("gspo", vanishes_with_advantage=True, reads=CLIP_RANGE, meant_for="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of GSPO, PPO's clip on the ratio of a whole sequence.

    The method is that of Zheng et al. 2025, arXiv:2507.18071. s_i = exp(mean over the row's sampled tokens of
    log r). Each token has s_it = sg[s_i] pi / sg[pi], whose value is s_i. This form lets tokens have
    advantages of their own (GSPO-token). If all tokens of a row have the same advantage, the gradient is that
    of GSPO. loss = max(-A s, -A clip(s, 1 - low, 1 + high)).

    The loss is meant for a small clip range: the paper has clip_ratio_low 3e-4, clip_ratio_high 4e-4. The
    aggregation is the configured one, as in verl 0.9.1 (verl 0.7.0 takes seq-mean-token-mean whatever is
    configured).
    """
    log_ratio = log_prob.detach() - old_log_prob
    row_mean = log_ratio.sum(dim=-1, keepdim=True) / response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = clamp_log_ratio(row_mean + log_prob - log_prob.detach()).exp()
    losses, is_clipped, _ = clipped_surrogate(ratio, advantages, *clip_range(config))
    return TokenLosses(losses, {"pg_clipfrac": is_clipped, "ppo_kl": -clamp_log_ratio(log_ratio)})


@token_loss(
    "geo_mean",
    vanishes_with_advantage=True,
    reads=CLIP_RANGE,
    meant_for="seq-mean-token-mean",
    is_weighted=False,
)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> TokenLosses:
    """Compute the loss of GMPO from the geometric mean of a row's clipped ratios.

    The method is that of Zhao et al. 2025, arXiv:2507.20673. loss_i = -A_i exp(mean_t c_t). c_t is the
    log-ratio cut to [-low, high] on the side that the advantage pushes to: min(log r, high) where A_i > 0,
    max(log r, -low) where A_i < 0. A_i is the mean of the row's advantages (the paper has one per row). The
    clip range is one of log-ratios: the paper has 0.4 on both sides. The rollout weights of a row are
    combined by their geometric mean too. Rows without a sampled token have no part in the mean over rows (in
    verl they have).

    As in verl, `actor/pg_clipfrac` is the share of tokens with A > 0 whose log-ratio is outside of [-low,
    high], on either side, and `actor/pg_clipfrac_lower` is the share of such tokens with A < 0.
    """
    low, high = clip_range(config)
    lengths = response_mask.sum(dim=-1, keepdim=True).clamp(min=1)

    def row_mean(values: Tensor) -> Tensor:
        return values.masked_fill(~response_mask, 0.0).sum(dim=-1, keepdim=True) / lengths

    advantage = row_mean(advantages)
    log_ratio = log_prob - old_log_prob
    cut = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    row_losses = -advantage * clamp_log_ratio(row_mean(cut)).exp()
    if rollout_is_weights is not None:
        row_losses = row_losses * row_mean(rollout_is_weights.log()).exp()
    is_outside = (log_ratio > high) | (log_ratio < -low)
    metrics = {
        "pg_clipfrac": is_outside & (advantages > 0),
        "pg_clipfrac_lower": is_outside & (advantages < 0),
        "ppo_kl": -clamp_log_ratio(log_ratio),
    }
    return TokenLosses(row_losses.expand(log_prob.shape), metrics)


@token_loss(
    "sapo", vanishes_with_advantage=True, reads=("tau_pos", "tau_neg"), meant_for="seq-mean-token-mean"
)
def compute_policy_loss_sapo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of SAPO, a soft gate in place of the clip (Gao et al. 2025, arXiv:2511.20347).

    loss = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg. The gradient is that of
    -A r times 4 p (1 - p), where p is the sigmoid. This factor is 1 at r = 1 and less on both sides. (verl
    aggregates by seq-mean-token-mean whatever is configured. Here the setting counts.) `actor/sapo_gate` is
    the mean of 4 p (1 - p): 1 while nothing is held back.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    positive, negative = (advantages.new_tensor(x) for x in (config.tau_pos, config.tau_neg))
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return TokenLosses(
        -advantages * gate * 4 / tau, {"sapo_gate": 4 * gate * (1 - gate), "ppo_kl": -log_ratio}
    )


def _covariances(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the covariance of each sampled token, [N, R] float64; -inf where nothing was sampled."""
    spread = [torch.zeros(mask.shape, dtype=torch.float64, device=mask.device) for _ in range(2)]
    for centred, values in zip(spread, (log_prob, advantages), strict=True):
        sampled = values.detach()[mask].double()
        centred[mask] = sampled - sampled.mean()
    return (spread[0] * spread[1]).masked_fill(~mask, -math.inf)


def _select_tokens(
    candidates: Tensor, covariances: Tensor, mask: Tensor, share: float, seed: int | None = None
) -> Tensor:
    """Choose from the candidates a share of the sampled tokens, rounded down, but at least one; [N, R] bool.

    Candidates are ordered by the greatest covariance, then from left to right, then by the fewest sampled
    tokens of their row. The first ones are chosen. With a seed, the chosen ones are drawn at random from the
    candidates in that order.
    """
    by_length = mask.sum(dim=-1).argsort(stable=True)
    columns, indices = candidates[by_length].T.nonzero(as_tuple=True)
    rows = by_length[indices]
    order = covariances[rows, columns].argsort(descending=True, stable=True)
    if seed is not None:
        order = order[
            torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).to(order.device)
        ]
    order = order[: max(1, math.floor(share * int(mask.sum()) + 1e-9))]
    chosen = torch.zeros_like(mask)
    chosen[rows[order], columns[order]] = True
    return chosen


def select_clip_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any, seed: int
) -> Tensor:
    """Choose the tokens of Clip-Cov: a random share policy_loss.clip_cov_ratio of the sampled tokens.

    They are drawn out of those with clip_cov_lb < cov < clip_cov_ub that PPO's clip leaves alone. See
    `SelectFn`.
    """
    mask = response_mask.bool()
    settings = config.policy_loss
    log_ratio = clamp_log_ratio((log_prob - old_log_prob).masked_fill(~mask, 0.0))
    _, is_clipped, _ = clipped_surrogate(
        log_ratio.exp(), advantages.masked_fill(~mask, 0.0), *clip_range(config)
    )
    covariances = _covariances(log_prob, advantages, mask)
    within = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    return _select_tokens(within & mask & ~is_clipped, covariances, mask, settings.clip_cov_ratio, seed)


def select_kl_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any, seed: int
) -> Tensor:
    """Choose the tokens of KL-Cov: the sampled tokens with the greatest cov.

    The share policy_loss.kl_cov_ratio of the sampled tokens is chosen.
    """
    mask = response_mask.bool()
    covariances = _covariances(log_prob, advantages, mask)
    return _select_tokens(mask, covariances, mask, config.policy_loss.kl_cov_ratio)


@token_loss(
    "clip_cov",
    select=select_clip_cov,
    vanishes_with_advantage=True,
    reads=(*CLIP_RANGE, *(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub"))),
)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any, selection: Tensor
) -> TokenLosses:
    """Compute the loss of Clip-Cov: PPO's clipped loss, and 0 for the chosen tokens.

    (verl chooses in each micro-batch separately, so that its loss depends on the split.) As in verl,
    `actor/pg_clipfrac` is the share of chosen tokens. `actor/ppo_clipfrac` is the share of tokens that PPO's
    clip holds.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    losses, is_clipped, _ = clipped_surrogate(log_ratio.exp(), advantages, *clip_range(config))
    metrics = {"pg_clipfrac": selection, "ppo_clipfrac": is_clipped, "ppo_kl": -log_ratio}
    return TokenLosses(losses.masked_fill(selection, 0.0), metrics)


@token_loss("kl_cov", select=select_kl_cov, reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"))
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any, selection: Tensor
) -> TokenLosses:
    """Compute the loss of KL-Cov: -A r, and for the chosen tokens additionally ppo_kl_coef |log r|.

    The distance is |log r|, as in the authors' code and in verl. Unlike an unbiased estimate of the KL, it
    draws each of these few tokens back to the old policy, wherever the token went. There is no clip. As in
    verl, `actor/ppo_kl` is the mean of |log r| here. `actor/cov_share` is the share of chosen tokens.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs()
    losses = -advantages * log_ratio.exp() + penalty.masked_fill(~selection, 0.0)
    return TokenLosses(losses, {"cov_share": selection, "ppo_kl": log_ratio.abs()})
