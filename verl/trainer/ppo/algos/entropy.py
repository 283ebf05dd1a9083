"""The entropy bonus, and what steers its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator, agg_loss


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


class EntropyController:
    """A fixed weight of the entropy bonus.

    `value` is the weight in the next update; after it `update` takes the entropy that was measured in it.
    """

    def __init__(self, coeff: float):
        self.coeff = coeff

    @property
    def value(self) -> float:
        return self.coeff

    def update(self, entropy: float) -> None:
        """Does nothing: the weight is fixed."""

    def state_dict(self) -> dict[str, float | None]:
        return {"coeff": self.coeff, "entropy": None}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """The weight stays the configured one."""


class AdaptiveEntropyController(EntropyController):
    """Keeps the entropy from falling below a target (Skywork-OR1, He et al. 2025, arXiv:2505.22312).

    After each step with mean token entropy e: coeff += delta if e < target_entropy, -= delta if e >
    target_entropy, within [min_coeff, max_coeff]. The bonus is on only where it is needed: value = coeff if
    e <= target_entropy, else 0. e is that of the step before (the paper's is that of the step itself, which
    would cost a pass of its own); before the first step the value is the coefficient that it starts with.
    """

    def __init__(self, coeff: float, target_entropy: float, delta: float, min_coeff: float, max_coeff: float):
        if not min_coeff <= coeff <= max_coeff:
            raise ValueError(
                f"actor.entropy_coeff={coeff} is where the adaptive weight starts; expected a number from "
                f"entropy_ctrl.min_coeff={min_coeff} to entropy_ctrl.max_coeff={max_coeff}."
            )
        super().__init__(coeff)
        self.target_entropy, self.delta = target_entropy, delta
        self.min_coeff, self.max_coeff = min_coeff, max_coeff
        self.entropy: float | None = None

    @property
    def value(self) -> float:
        return self.coeff if self.entropy is None or self.entropy <= self.target_entropy else 0.0

    def update(self, entropy: float) -> None:
        """Takes the mean entropy (nats) of the step's sampled tokens; passes over one that is not finite."""
        if not math.isfinite(entropy):
            return
        self.entropy = entropy
        step = self.delta * ((entropy < self.target_entropy) - (entropy > self.target_entropy))
        self.coeff = min(max(self.coeff + step, self.min_coeff), self.max_coeff)

    def state_dict(self) -> dict[str, float | None]:
        return {"coeff": self.coeff, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Goes on where a run stopped, within the limits that are configured now."""
        coeff = state["coeff"]
        assert coeff is not None
        self.coeff, self.entropy = min(max(coeff, self.min_coeff), self.max_coeff), state["entropy"]


def get_entropy_controller(actor: Mapping[str, Any]) -> EntropyController:
    """The controller that the `actor` block describes: `entropy_coeff`, `entropy_ctrl` {type, target_entropy,
    delta, min_coeff, max_coeff}.
    """
    control, coeff = actor["entropy_ctrl"], actor["entropy_coeff"]
    if control["type"] == "fixed":
        return EntropyController(coeff)
    if control["type"] != "adaptive":
        raise ValueError(f"entropy_ctrl.type: found {control['type']!r}, expected 'fixed' or 'adaptive'.")
    target = control["target_entropy"]
    if target is None:
        raise ValueError(
            "entropy_ctrl.type=adaptive needs entropy_ctrl.target_entropy (nats per token, for example 0.2)."
        )
    return AdaptiveEntropyController(
        coeff, target, control["delta"], control["min_coeff"], control["max_coeff"]
    )
