"""Policy losses without a clip on the surrogate, and losses that learn without a reward.

The first kind weights the score function by the ratio r, or not at all: importance sampling, GPG, CISPO,
AIPO, IPO, DPPO, DRO. The second kind learns from a text or from a teacher instead of a reward: sft,
distillation.

For symbols see `policy_losses`. Where r is 1 the gradient of the first kind is that of -A log pi. The papers
on asynchronous training have the sampling engine's probabilities in the place of pi_old. With
`algorithm.rollout_correction.bypass_mode` that is what old_log_prob holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algos.policy_losses import (
    CLIP_RANGE,
    LossAndMetrics,
    TokenLosses,
    clamp_log_ratio,
    clip_range,
    token_loss,
)


@token_loss("importance_sampling", vanishes_with_advantage=True)
def compute_policy_loss_importance_sampling(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor
) -> TokenLosses:
    """Compute -A r, the policy gradient from samples of an older policy, per token; nothing bounds r."""
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    return TokenLosses(-advantages * log_ratio.exp(), {"ppo_kl": -log_ratio})


@token_loss("gpg", vanishes_with_advantage=True)
def compute_policy_loss_gpg(
    log_prob: Tensor, advantages: Tensor, old_log_prob: Tensor | None = None
) -> TokenLosses:
    """Compute the loss of group policy gradient (Chu et al. 2025, arXiv:2504.02546): -A log pi, no ratio.

    The paper's factor for groups of equal rewards belongs to the advantages (adv_estimator gpg). old_log_prob
    is used only for the metric `actor/ppo_kl`, which is left out without it.
    """
    metrics = {} if old_log_prob is None else {"ppo_kl": clamp_log_ratio(old_log_prob - log_prob)}
    return TokenLosses(-advantages * log_prob, metrics)


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the loss of REINFORCE, -w A log pi, with the rollout weights w, for users.

    It is `compute_policy_loss_gpg` under verl's name and with verl's arguments. `actor/ppo_kl` is the mean
    of rollout_log_prob - log_prob.
    """
    batch = (rollout_log_prob, log_prob, advantages, response_mask)
    return compute_policy_loss_gpg(*batch, loss_agg_mode, config, rollout_is_weights)


def _weighted_score(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    low: float | None,
    high: float | None,
    left_out: Tensor | None = None,
) -> TokenLosses:
    """Return the losses -sg[r cut to [low, high]] A log pi, and 0 for tokens that are left out."""
    log_ratio = clamp_log_ratio(log_prob.detach() - old_log_prob)
    ratio = log_ratio.exp()
    weight = ratio if low is None and high is None else ratio.clamp(low, high)
    losses = -weight * advantages * log_prob
    is_cut = weight != ratio
    if left_out is None:
        return TokenLosses(losses, {"pg_clipfrac": is_cut, "ppo_kl": -log_ratio})
    metrics = {"pg_clipfrac": left_out, "ppo_kl": -log_ratio}
    if high is not None:
        metrics["pg_clipfrac_lower"] = is_cut & ~left_out
    return TokenLosses(losses.masked_fill(left_out, 0.0), metrics)


@token_loss("cispo", vanishes_with_advantage=True, reads=CLIP_RANGE)
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of CISPO, which clips the weight but keeps the gradient of every token.

    loss = -sg[clip(r, 1 - low, 1 + high)] A log pi (MiniMax-M1, arXiv:2506.13585). The paper sets no lower
    bound (clip_ratio_low=1). `actor/pg_clipfrac` is the share of tokens whose weight was clipped.
    """
    low, high = clip_range(config)
    return _weighted_score(log_prob, old_log_prob, advantages, 1 - low, 1 + high)


@token_loss("aipo", vanishes_with_advantage=True, reads=("policy_loss.aipo_max_ratio",))
def compute_policy_loss_aipo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of AIPO (LlamaRL, arXiv:2505.24034), which cuts the ratio only from above.

    loss = -sg[min(r, rho)] A log pi with rho = policy_loss.aipo_max_ratio. `actor/pg_clipfrac` is the share
    of tokens whose ratio was cut.
    """
    return _weighted_score(log_prob, old_log_prob, advantages, None, config.policy_loss.aipo_max_ratio)


@token_loss("ipo", reads=("policy_loss.ipo_eps", "policy_loss.ipo_kl_tau"))
def compute_policy_loss_ipo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of IPO, INTELLECT policy optimization (the default loss of prime-rl).

    Tokens whose probability moved too far, up or down, are left out, whatever the sign of the advantage. loss
    = -[|pi - pi_old| <= eps] A r + kl_tau (log r)^2, where eps = policy_loss.ipo_eps is a difference of
    probabilities and kl_tau = policy_loss.ipo_kl_tau. The second term (Kimi K2.5, arXiv:2602.02276) holds for
    the left-out tokens too. `actor/pg_clipfrac` is the share of left-out tokens.
    """
    settings = config.policy_loss
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    left_out = (log_prob.detach().exp() - old_log_prob.exp()).abs() > settings.ipo_eps
    surrogate = (-advantages * log_ratio.exp()).masked_fill(left_out, 0.0)
    metrics = {"pg_clipfrac": left_out, "ppo_kl": -log_ratio}
    return TokenLosses(surrogate + settings.ipo_kl_tau * log_ratio.square(), metrics)


@token_loss("dppo_tv", vanishes_with_advantage=True, reads=(*CLIP_RANGE, "clip_ratio_c"))
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of DPPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879).

    loss = -M sg[min(r, c)] A log pi. M = 0 where the update would lead further away from pi_old than it
    already is: where A > 0 and pi - pi_old > high, or A <= 0 and pi_old - pi > low. As in verl, the actor
    block's clip range holds the bounds, which are differences of probabilities here, and clip_ratio_c holds
    the greatest ratio (the paper has a large one, 20, if any). `actor/pg_clipfrac` is the share of tokens
    with M = 0. `actor/pg_clipfrac_lower` is the share of tokens whose ratio was cut.
    """
    low, high = clip_range(config)
    moved = log_prob.detach().exp() - old_log_prob.exp()
    left_out = torch.where(advantages > 0, moved > high, moved < -low)
    return _weighted_score(log_prob, old_log_prob, advantages, None, config.clip_ratio_c, left_out)


@token_loss("dppo_kl", vanishes_with_advantage=True, reads=(*CLIP_RANGE, "clip_ratio_c"))
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of DPPO with the binary KL (Qi et al. 2026, arXiv:2602.04879).

    It is like `dppo_tv` but for the distance. D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), where p = pi
    and q = pi_old of the sampled token (nats). M = 0 where D > high, A > 0 and p > q, and where D > low, A <=
    0 and p < q.
    """
    low, high = clip_range(config)
    new = log_prob.detach().clamp(max=0.0)
    old = old_log_prob.clamp(max=0.0)
    others_new, others_old = (-torch.expm1(x) for x in (new, old))
    others = others_old * (others_old.clamp(min=1e-8).log() - others_new.clamp(min=1e-8).log())
    divergence = old.exp() * (old - new) + others
    too_high = (new > old) & (divergence > high)
    too_low = (new < old) & (divergence > low)
    left_out = torch.where(advantages > 0, too_high, too_low)
    return _weighted_score(log_prob, old_log_prob, advantages, None, config.clip_ratio_c, left_out)


def _dro_beta(config: Any) -> float:
    """Return policy_loss.dro_beta; raise ValueError if it is not above 0."""
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta: found {beta}, expected a number above 0.")
    return float(beta)


@token_loss("dro", reads=("policy_loss.dro_beta",))
def compute_policy_loss_dro(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of DRO as verl has it: -A log pi + (beta / 2) (log r)^2 of each token.

    beta = policy_loss.dro_beta. No ratio weighs the score function. The square draws each token back to the
    old policy. `dro_sequence` is the papers' method, with the square of a whole row's log-ratio.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    penalty = 0.5 * _dro_beta(config) * log_ratio.square()
    return TokenLosses(-(log_prob * advantages - penalty), {"ppo_kl": -log_ratio})


@token_loss("dro_sequence", reads=("policy_loss.dro_beta",), meant_for="seq-mean-token-sum")
def compute_policy_loss_dro_sequence(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any
) -> TokenLosses:
    """Compute the loss of DRO, direct reward optimisation, on whole rows.

    Least squares take the place of a ratio (Richemond et al. 2024, arXiv:2405.19107; Kimi k1.5,
    arXiv:2501.12599, its policy optimization). For a row with advantage A and log-ratio rho = sum_t log r,
    the loss is (A - beta rho)^2 / (2 beta), where beta = policy_loss.dro_beta, without the term A^2 / (2
    beta), which has no gradient: -A rho + beta rho^2 / 2. The share of token t is log r_t (-A_t + beta rho /
    2). The papers centre the rewards by a value or by the group's mean. Here that is the advantage, best left
    undivided (norm_adv_by_std_in_grpo=false).

    The aggregation that the loss is meant for is the papers' mean over rows. `actor/dro_penalty` is the
    second term's share of the loss, as a token mean.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    penalty = _dro_beta(config) / 2 * log_ratio.sum(dim=-1, keepdim=True) * log_ratio
    return TokenLosses(penalty - advantages * log_ratio, {"dro_penalty": penalty, "ppo_kl": -log_ratio})


@token_loss("sft", is_weighted=False)
def compute_policy_loss_sft(log_prob: Tensor) -> TokenLosses:
    """Compute the cross-entropy -log pi on every token of response_mask, whatever its advantage (nats).

    `actor/nll` is the same as a token mean, in every loss_agg_mode.
    """
    return TokenLosses(-log_prob, {"nll": -log_prob})


@token_loss("distillation")
def compute_policy_loss_distillation(
    old_log_prob: Tensor, log_prob: Tensor, teacher_log_prob: Tensor
) -> TokenLosses:
    """Compute the loss of on-policy distillation, the reverse KL(pi || teacher) on the policy's own samples.

    The method is that of Agarwal et al. 2023, arXiv:2306.13649, and Gu et al. 2023, arXiv:2306.08543. With d
    = log pi - log teacher of the sampled token, loss = r sg[d]. This is importance sampling with the
    advantage -d. Its value is an unbiased estimate of each token's KL in nats (k1). Its gradient r d grad log
    pi is an unbiased estimate of the gradient of that KL, because sum pi d grad log pi = grad sum pi d (sum
    grad pi is 0).

    The estimators that are often put into a loss are not unbiased in this way: the derivative of k1 itself is
    grad log pi, whose mean is 0, and that of k3 is the gradient of KL(teacher || pi). The effect of a token
    on the tokens after it is left out, as usual (discount 0).

    `actor/distillation_kl` is the token mean of d. There is no reward in this loss: advantages are not read.
    """
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    difference = log_prob.detach() - teacher_log_prob
    return TokenLosses(difference * log_ratio.exp(), {"distillation_kl": difference, "ppo_kl": -log_ratio})
