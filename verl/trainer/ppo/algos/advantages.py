"""Advantage estimators by name, and the one call that the trainer makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from verl.trainer.ppo.algos.registry import Registry, call_with


class AdvantageEstimator(str, Enum):
    """The estimators that `algorithm.adv_estimator` can name."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
ADV_ESTIMATORS: Registry[AdvantageFn] = Registry("algorithm.adv_estimator")


def _name(name: str | AdvantageEstimator) -> str:
    return name.value if isinstance(name, AdvantageEstimator) else name


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: makes an estimator known under a name, for `algorithm.adv_estimator`.

    The function names as parameters what it needs out of those of `compute_advantage`; it returns
    (advantages, returns), both [N, R].
    """
    return ADV_ESTIMATORS.register(_name(name))


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator registered under a name, or at an import path `package.module:function`."""
    return ADV_ESTIMATORS.get(_name(name))


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
    available = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "values": values,
        "index": index,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
    }
    fn = get_adv_estimator_fn(adv_estimator)
    advantages, returns = call_with(fn, available, f"Estimator {_name(adv_estimator)!r}")
    return advantages, returns
