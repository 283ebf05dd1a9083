"""The distance to a reference policy: estimators, coefficients that steer it, and KL in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LOG_RATIO_LIMIT, agg_loss

if TYPE_CHECKING:
    from verl.protocol import DataProto

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


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
