"""Advantage estimators by name, and the one call that the trainer makes.

    estimator_inputs(name) -> what the trainer has to get ready (values, index, reward_baselines, ...)
    compute_advantage(name, rewards, mask, ...) -> advantages, returns [N, R]

The estimators stand in `gae`, `groups`, `baselines` and `token_baseline`; a user's own is registered with
`register_adv_est`, or named by import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from verl.trainer.ppo.algos.registry import Registry, call_with
from verl.trainer.ppo.algos.turns import add_turn_rewards, turn_advantages

if TYPE_CHECKING:
    from verl.trainer.ppo.algos.baselines import RunningBaseline


class AdvantageEstimator(str, Enum):
    """The estimators that `algorithm.adv_estimator` can name."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_PASSK = "grpo_passk"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    MAXRL = "maxrl"
    RAE = "rae"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


# These credit each token with the rewards that come after it, so that a turn's reward can be one of them.
TOKEN_WISE = frozenset(
    {
        AdvantageEstimator.GAE.value,
        AdvantageEstimator.REINFORCE_PLUS_PLUS.value,
        AdvantageEstimator.OPTIMAL_TOKEN_BASELINE.value,
        AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE.value,
    }
)

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


def estimator_inputs(name: str | AdvantageEstimator, turn_credit: float = 0.0) -> set[str]:
    """Those arguments of `compute_advantage` that the named estimator makes use of, optional ones included.

    What is not in it need not be computed: "values" stands for a critic, "index" for groups (or is what
    turns are compared in), "reward_baselines" for greedy rollouts, and so on. `turn_credit` other than 0 adds
    what per-turn credit takes.
    """
    known = set(inspect.signature(compute_advantage).parameters) - {"adv_estimator", "turn_credit"}
    inputs = known & set(inspect.signature(get_adv_estimator_fn(name)).parameters)
    if turn_credit:
        inputs |= {"turn_ids", "turn_rewards"} | (set() if _name(name) in TOKEN_WISE else {"index"})
    return inputs


def compute_advantage(
    adv_estimator: str | AdvantageEstimator,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
    index: Sequence[Any] | np.ndarray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    reward_baselines: Tensor | None = None,
    reward_components: Mapping[str, Tensor] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    running_baseline: RunningBaseline | None = None,
    baseline_keys: Sequence[str] | np.ndarray | None = None,
    turn_ids: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn_credit: float = 0.0,
    config: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N, R] of the named estimator, called with those arguments that it asks for.

    All rows of a step come in one call; nothing under a 0 of the mask has any influence, and both results are
    0 there. `estimator_inputs` says which of these the estimator takes.

    Args:
        token_level_rewards: [N, R], the outcome on the last sampled token, a KL penalty on any of them.
        response_mask: [N, R], 1 where the policy sampled the token.
        values: [N, R] the critic's value of the state before each token.
        index: [N] uid of each row: one prompt of one step. Rows with equal uids are a group.
        gamma, lam: discount per sampled token, and lambda of GAE.
        norm_adv_by_std_in_grpo: whether group estimators divide by the group's standard deviation.
        reward_baselines: [N] score of the greedy answer to the row's prompt.
        reward_components: name -> [N], the rewards that the outcome is made of.
        reward_weights: name -> weight of that component; 1 where it is not named.
        old_log_probs: [N, R] log-probability of each sampled token under the policy before the update.
        sum_pi_squared: [N, R] sum over the vocabulary of that policy's squared probabilities.
        rollout_is_weights: [N, R] importance weights that the loss will be multiplied with.
        running_baseline: kept over steps. It is only read here: afterwards call its `update`.
        baseline_keys: [N] which running mean each row belongs to (its data source, or data source/role).
        turn_ids: [N, R] int64 number of the turn, from 0, that each sampled token belongs to; -1 elsewhere.
        turn_rewards: [N, T] reward of each turn, NaN where a turn has none.
        turn_credit: weight of the turn rewards; 0 leaves them out (see `turns`).
        config: the configuration's `algorithm` block, for a user's own estimator.

    Raises:
        ValueError: an argument that the estimator needs is None, or does not fit the others.
    """
    available = dict(locals())  # the arguments, by name
    for name in ("adv_estimator", "turn_credit"):
        del available[name]
    fn, what = get_adv_estimator_fn(adv_estimator), f"Estimator {_name(adv_estimator)!r}"
    if not turn_credit:
        return call_with(fn, available, what)
    if turn_ids is None or turn_rewards is None:
        raise ValueError("Credit for turns needs turn_ids and turn_rewards, which this batch does not have.")
    if _name(adv_estimator) in TOKEN_WISE:
        available["token_level_rewards"] = add_turn_rewards(
            token_level_rewards, response_mask, turn_ids, turn_rewards, turn_credit
        )
        return call_with(fn, available, what)
    if index is None:
        raise ValueError(f"{what} takes credit for turns from their groups and needs index.")
    advantages, returns = call_with(fn, available, what)
    by_turn = turn_advantages(response_mask, turn_ids, turn_rewards, index, norm_adv_by_std_in_grpo)
    return advantages + (turn_credit * by_turn).to(advantages.dtype), returns
