"""Terms that hold the policy near a reference, and terms that keep its entropy up.

Here are the estimators of the KL, the KL in the reward, and the coefficients of both kinds of terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.algos.aggregation import LOG_RATIO_LIMIT, LossDenominator, agg_loss

if TYPE_CHECKING:
    from verl.protocol import DataProto

KL_VALUES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_PENALTIES = (*KL_VALUES, *(f"{name}+" for name in KL_VALUES))


class FixedKLController:
    """A KL coefficient that never changes."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing, because the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: the coefficient stays the configured one."""


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that is steered so that the KL stays near a target.

    The method is that of Ziegler et al. 2019, arXiv:1909.08593, section 2.2. error = clip(current_kl /
    target_kl - 1, -0.2, 0.2); value *= 1 + error * min(n_steps / horizon, 1), where n_steps is the number of
    trajectories since the last update. If there are more of them than the horizon, they count as the horizon.
    Otherwise the value could turn negative, and the KL would be rewarded.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(n_steps, self.horizon) / self.horizon

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> FixedKLController:
    """Return the controller that `algorithm.kl_ctrl` {type, kl_coef, target_kl, horizon} describes.

    Raises ValueError if the type is neither fixed nor adaptive, or if the horizon is not above 0.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type != "adaptive":
        raise ValueError(f"kl_ctrl.type: found {kl_ctrl.type!r}, expected fixed or adaptive.")
    if not kl_ctrl.horizon > 0:
        raise ValueError(f"kl_ctrl.horizon: found {kl_ctrl.horizon}, expected a number above 0.")
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled token, in the shape of the inputs.

    Let d = logprob - ref_logprob of a token drawn from the policy p (reference q), let s = grad log p of it,
    and let expectations be over p (Schulman 2020, "Approximating KL Divergence"; for the gradients Tang &
    Munos 2025, arXiv:2506.09477, and Liu et al. 2025, arXiv:2510.01555):

        name            value            its mean     gradient         the mean of that
        kl, k1          d                KL(p||q)     s                0
        abs             |d|              -            sign(d) s        grad sum |p - q|
        mse, k2         d^2 / 2          -            d s              grad KL(p||q)
        low_var_kl, k3  exp(-d) - 1 + d  KL(p||q)     (1 - exp(-d)) s  grad KL(q||p)
        any with `+`    of that name     of that one  d s, k2's        grad KL(p||q)

    So in a loss k2 or a name with `+` (verl's straight-through form) pulls by the KL that is meant. k3 pulls
    by the KL with its sides exchanged, and k1 does not pull at all. All of these see the KL of each token
    after its prefix, not the effect of a token on the KL of those after it. In a reward nothing is
    differentiated: k1 is the unbiased one, and its gradient is that of the whole trajectory's KL.

    k3 is limited to [-10, 10], as in verl, and d is limited to [-20, 20] before the exponential. Where d <
    -2.6 the gradient of k3 is 0; `k3+` has that of k2 there.

    Raises:
        ValueError: there is no estimator of that name.
    """
    if kl_penalty not in KL_PENALTIES:
        hint = "full needs the logits of the whole vocabulary, which are never built"
        raise ValueError(
            f"KL estimator: found {kl_penalty!r}, expected one of {', '.join(KL_PENALTIES)} ({hint})."
        )
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    k2 = 0.5 * (logprob - ref_logprob).square()
    return value.detach() + (k2 - k2.detach())


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the value of the estimator of a name without `+`, with its own gradient; see `kl_penalty`.

    Raises:
        ValueError: there is no estimator of that name.
    """
    if kl_penalty not in KL_VALUES:
        raise ValueError(f"KL estimator: found {kl_penalty!r}, expected one of {', '.join(KL_VALUES)}.")
    difference = logprob - ref_logprob
    if kl_penalty in ("kl", "k1"):
        return difference
    if kl_penalty == "abs":
        return difference.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * difference.square()
    negative = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (negative.exp() - negative - 1).clamp(-10.0, 10.0)


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Return the scores minus `kl_ratio` times the k1 estimate of the KL, all [N, R]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_kl_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_loss_type: str,
    loss_agg_mode: str = "token-mean",
    denominator: LossDenominator | None = None,
) -> Tensor:
    """Compute the KL term of the actor's loss: `kl_penalty` of the sampled tokens [N, R], as a scalar.

    Only log_prob carries a gradient. The expectations in `kl_penalty` hold where the tokens come from the
    policy itself. From the second optimizer step of a batch on, they are as far off as the policy has moved.
    """
    mask = response_mask.bool()
    log_prob, ref_log_prob = (x.masked_fill(~mask, 0.0) for x in (log_prob, ref_log_prob.detach()))
    kl = kl_penalty(log_prob, ref_log_prob, kl_loss_type)
    return agg_loss(kl, mask, loss_agg_mode, denominator=denominator)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: FixedKLController, kl_penalty_type: str = "kl"
) -> dict[str, float]:
    """Put the KL into the reward and update the controller.

    Writes token_level_rewards = token_level_scores - coefficient * KL. Reads token_level_scores,
    old_log_probs, ref_log_prob and response_mask from `data.batch`.

    Returns:
        Metrics: critic/kl (mean over trajectories of the mean over their sampled tokens) and critic/kl_coeff
        (as applied).
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


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Return the mean entropy (nats) of next-token distributions, as in verl: logits [N, R, V] -> scalar.

    The actor never builds such logits. It aggregates the entropies that `linear_log_prob` returns.
    """
    log_p = logits.float().log_softmax(dim=-1)
    return agg_loss(-(log_p.exp() * log_p).sum(dim=-1), response_mask, loss_agg_mode)


class EntropyController:
    """The weight of the entropy bonus in the next update: `coeff`, fixed or, with a target, steered.

    With a target, the controller keeps the entropy from falling below it (Skywork-OR1, He et al. 2025,
    arXiv:2505.22312). After each step with mean token entropy e, coeff += delta if e < target_entropy, and
    coeff -= delta if e > target_entropy, within [min_coeff, max_coeff]. The bonus is on only where it is
    needed:
    value = coeff if e <= target_entropy, else 0.

    e is that of the step before. (In the paper it is that of the step itself, which would cost a pass of its
    own.) Before the first step the value is the coefficient that the controller starts with.
    """

    def __init__(
        self,
        coeff: float,
        target_entropy: float | None = None,
        delta: float = 0.0,
        min_coeff: float = -math.inf,
        max_coeff: float = math.inf,
    ):
        self.coeff = coeff
        self.target_entropy = target_entropy
        self.delta = delta
        self.min_coeff = min_coeff
        self.max_coeff = max_coeff
        self.entropy: float | None = None

    @property
    def value(self) -> float:
        entropy = self.entropy
        target = self.target_entropy
        return self.coeff if entropy is None or target is None or entropy <= target else 0.0

    def update(self, entropy: float) -> None:
        """Take in the mean entropy (nats) of the step's sampled tokens; ignore one that is not finite."""
        if self.target_entropy is None or not math.isfinite(entropy):
            return
        self.entropy = entropy
        step = self.delta * ((entropy < self.target_entropy) - (entropy > self.target_entropy))
        self.coeff = min(max(self.coeff + step, self.min_coeff), self.max_coeff)

    def state_dict(self) -> dict[str, float | None]:
        return {"coeff": self.coeff, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Continue where a run stopped, within the current limits.

        A fixed weight stays the configured one.
        """
        if self.target_entropy is not None:
            coeff = state["coeff"]
            assert coeff is not None
            self.coeff = min(max(coeff, self.min_coeff), self.max_coeff)
            self.entropy = state["entropy"]


def get_entropy_controller(actor: Any) -> EntropyController:
    """Return the controller that the `actor` block describes: `entropy_coeff`, `entropy_ctrl`."""
    control = actor.entropy_ctrl
    limits = control.delta, control.min_coeff, control.max_coeff
    return EntropyController(actor.entropy_coeff, control.target_entropy, *limits)
