"""The algorithms, as pure functions: rewards go in, advantages and losses come out.

Shapes: N trajectories (rows), R response tokens (columns), all floats float32. `response_mask` [N, R] is 1
where the policy sampled the token and 0 on observations and padding. Whatever stands under a 0 (NaN too) has
no influence on any result here, and advantages and returns are 0 there.

    token_level_scores [N, R] --apply_kl_penalty--> token_level_rewards [N, R]
    token_level_rewards, values, uid --compute_advantage--> advantages, returns [N, R]
    log_prob, old_log_prob, advantages --compute_policy_loss--> scalar;  vpreds, returns
    --compute_value_loss--> scalar

New estimators and losses are added with `register_adv_est` and `register_policy_loss`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far outside of any clip range, and finite in float32
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


# ---------------------------------------------------------------------------------------------------------
# KL control (KL in the reward)


class FixedKLController:
    """A KL coefficient that never changes."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The coefficient stays the configured one."""


class AdaptiveKLController(FixedKLController):
    """Steers the KL coefficient so that the KL stays near a target (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2).

    error = clip(current_kl / target_kl - 1, -0.2, 0.2); value *= 1 + error * n_steps / horizon,
    with n_steps the number of trajectories since the last update.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"algorithm.kl_ctrl: target_kl and horizon must be positive, found target_kl={target_kl}, "
                f"horizon={horizon}; set both for the adaptive controller."
            )
        super().__init__(init_kl_coef)
        self.target_kl, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Mapping[str, Any]) -> FixedKLController:
    """The controller that `algorithm.kl_ctrl` {type, kl_coef, target_kl, horizon} describes."""
    if kl_ctrl["type"] == "fixed":
        return FixedKLController(kl_ctrl["kl_coef"])
    if kl_ctrl["type"] == "adaptive":
        target_kl, horizon = kl_ctrl.get("target_kl"), kl_ctrl.get("horizon")
        if target_kl is None or horizon is None:
            raise ValueError(
                "algorithm.kl_ctrl.type=adaptive needs kl_ctrl.target_kl and kl_ctrl.horizon, "
                f"found target_kl={target_kl}, horizon={horizon}."
            )
        return AdaptiveKLController(kl_ctrl["kl_coef"], target_kl, horizon)
    raise ValueError(f"algorithm.kl_ctrl.type: found {kl_ctrl['type']!r}, expected 'fixed' or 'adaptive'.")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled token, same shape as the inputs.

    With d = logprob - ref_logprob (Schulman, "Approximating KL divergence", 2020): `kl`/`k1` d; `abs` |d|;
    `mse`/`k2` d^2 / 2; `low_var_kl`/`k3` exp(-d) - 1 + d, limited to [-10, 10]. In `k3` d is limited to
    [-20, 20] before the exponential, so that it is finite everywhere.
    """
    if kl_penalty not in KL_PENALTIES:
        hint = (
            " ('full' needs the logits of the whole vocabulary, which are never built)"
            if kl_penalty == "full"
            else ""
        )
        raise ValueError(
            f"KL estimator: found {kl_penalty!r}, expected one of {', '.join(KL_PENALTIES)}{hint}."
        )
    difference = logprob - ref_logprob
    if kl_penalty in ("kl", "k1"):
        return difference
    if kl_penalty == "abs":
        return difference.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * difference.square()
    negative = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (negative.exp() - negative - 1).clamp(-10.0, 10.0)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: FixedKLController, kl_penalty_type: str = "kl"
) -> dict[str, float]:
    """KL in the reward: writes token_level_rewards = token_level_scores - coefficient * KL, updates the
    controller.

    Reads token_level_scores, old_log_probs, ref_log_prob, response_mask from `data.batch`. Returns metrics:
    critic/kl (mean over trajectories of the mean over their sampled tokens) and critic/kl_coeff (as applied).
    """
    assert data.batch is not None
    mask = data.batch["response_mask"].bool()
    kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_type)
    kl = kl.masked_fill(~mask, 0.0)
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_ctrl.value * kl
    current_kl = agg_loss(kl, mask, "seq-mean-token-mean").item()
    metrics = {"critic/kl": current_kl, "critic/kl_coeff": kl_ctrl.value}
    kl_ctrl.update(current_kl, n_steps=int(mask.any(dim=-1).sum()))
    return metrics


# ---------------------------------------------------------------------------------------------------------
# Advantages


class AdvantageEstimator(str, Enum):
    """The estimators that `algorithm.adv_estimator` can name."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
ADV_ESTIMATORS: dict[str, AdvantageFn] = {}


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: makes an estimator known under a name, for `algorithm.adv_estimator`.

    The function names as parameters what it needs out of: token_level_rewards, response_mask, values, index,
    gamma, lam, norm_adv_by_std_in_grpo; it returns (advantages, returns), both [N, R].
    """
    key = name.value if isinstance(name, AdvantageEstimator) else name

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        if ADV_ESTIMATORS.get(key, fn) is not fn:
            raise ValueError(f"Advantage estimator {key!r} is registered already; choose another name.")
        ADV_ESTIMATORS[key] = fn
        return fn

    return decorate


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator registered under a name."""
    key = name.value if isinstance(name, AdvantageEstimator) else name
    if key not in ADV_ESTIMATORS:
        raise ValueError(
            f"algorithm.adv_estimator: found {key!r}, expected one of {', '.join(ADV_ESTIMATORS)}."
        )
    return ADV_ESTIMATORS[key]


def compute_advantage(
    adv_estimator: str | AdvantageEstimator,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
    index: Sequence[Any] | np.ndarray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N, R] of the named estimator, called with those arguments that it asks for."""
    fn = get_adv_estimator_fn(adv_estimator)
    available = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "values": values,
        "index": index,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
    }
    inputs = {name: available[name] for name in inspect.signature(fn).parameters if name in available}
    missing = [name for name, value in inputs.items() if value is None]
    if missing:
        raise ValueError(
            f"Estimator {adv_estimator!r} needs {', '.join(missing)}, which this batch does not have."
        )
    return fn(**inputs)


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), mean and unbiased variance taken where mask is 1; 0 elsewhere."""
    mask = mask.bool()
    kept = values[mask]
    if kept.numel() == 0:
        return torch.zeros_like(values)
    variance = kept.var() if kept.numel() > 1 else kept.new_zeros(())
    return ((values - kept.mean()) * torch.rsqrt(variance + epsilon)).masked_fill(~mask, 0.0)


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16) over sampled
    tokens only.

    With t+ the next *sampled* token after t (observations in between are stepped over; V = A = 0 past the
    last): delta_t = r_t + gamma * V_{t+} - V_t;  A_t = delta_t + gamma * lam * A_{t+};  returns = A + V.
    The advantages are then whitened over the sampled tokens of the batch, the returns are not.

    values [N, R]: value of the state before each token. Returns (advantages, returns), both [N, R], 0
    where masked.
    """
    mask = response_mask.bool()
    rewards, values = token_level_rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = next_advantage
    returns = (advantages + values).masked_fill(~mask, 0.0)
    return masked_whiten(advantages, mask), returns


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


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): discounted reward-to-go, whitened over the sampled tokens
    of the batch.

    G_t = r_t + gamma * G_{t+} with t+ the next sampled token; A = (G - mean) / std. Returns (A, G).
    """
    mask = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~mask, 0.0)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return masked_whiten(returns, mask), returns.masked_fill(~mask, 0.0)


# ---------------------------------------------------------------------------------------------------------
# Losses


@dataclass(frozen=True)
class LossDenominator:
    """What a loss over the whole mini-batch (all micro-batches, all ranks) is divided by.

    num_tokens: sampled tokens; num_sequences: rows with at least one. A micro-batch's losses and metrics
    divided by these add up to those of the whole mini-batch, however it was split.
    """

    num_tokens: float
    num_sequences: float

    @classmethod
    def of(cls, mask: Tensor) -> LossDenominator:
        """Counts the [N, R] mask of a whole mini-batch; at least 1 each, so that an empty one gives a loss
        of 0.
        """
        mask = mask.bool()
        return cls(max(float(mask.sum()), 1.0), max(float(mask.any(dim=-1).sum()), 1.0))


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, denominator: LossDenominator | None = None
) -> Tensor:
    """Reduces per-token losses [N, R] to a scalar over the entries where the mask is 1.

    token-mean: sum over tokens / number of tokens (DAPO, arXiv:2503.14476). seq-mean-token-sum: sum over
    tokens / number of rows (Dr. GRPO). seq-mean-token-mean: mean of each row's token mean (GRPO). The
    numbers that are divided by come from `denominator`, by default this very mask: give the whole
    mini-batch's for a part of it.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode: found {loss_agg_mode!r}, expected one of {', '.join(LOSS_AGG_MODES)}."
        )
    mask = loss_mask.bool()
    denominator = denominator or LossDenominator.of(mask)
    loss_mat = loss_mat.masked_fill(~mask, 0.0)
    if loss_agg_mode == "token-mean":
        return loss_mat.sum() / denominator.num_tokens
    if loss_agg_mode == "seq-mean-token-mean":
        loss_mat = loss_mat / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return loss_mat.sum() / denominator.num_sequences


PolicyLossFn = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
POLICY_LOSSES: dict[str, PolicyLossFn] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: gives a name to a policy loss with the parameters and results of `compute_policy_loss`."""

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        if POLICY_LOSSES.get(name, fn) is not fn:
            raise ValueError(f"Policy loss {name!r} is registered already; choose another name.")
        POLICY_LOSSES[name] = fn
        return fn

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered under a name."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"Policy loss: found {name!r}, expected one of {', '.join(POLICY_LOSSES)}.")
    return POLICY_LOSSES[name]


@register_policy_loss("vanilla")
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


def compute_entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> Tensor:
    """The entropy bonus: per-token entropies [N, R] (nats, as the policy's forward gives them) reduced to
    a scalar.
    """
    return agg_loss(entropy, response_mask, loss_agg_mode, denominator)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss: 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    vpreds V, values V_old and returns R are [N, R]. Returns (loss, fraction of tokens where the clipped
    term is larger).
    """
    mask = response_mask.bool()
    vpreds, returns, values = (x.masked_fill(~mask, 0.0) for x in (vpreds, returns, values))
    clipped_vpreds = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    squared, clipped_squared = (vpreds - returns).square(), (clipped_vpreds - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(squared, clipped_squared), mask, loss_agg_mode, denominator)
    return loss, agg_loss((clipped_squared > squared).float(), mask, "token-mean", denominator)
