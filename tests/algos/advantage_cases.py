"""What each advantage estimator is given in the tests: the fields of `AdvantageInputs`, made of a
`RaggedBatch`, and the slow function that says what should come out.
"""

from __future__ import annotations

from typing import Any

import slow_advantages as slow
import torch
from ragged_batches import RaggedBatch
from torch import Tensor

from verl.trainer.ppo import core_algos as algos

SLOW = {name: getattr(slow, name) for name in (estimator.value for estimator in algos.AdvantageEstimator)}
NAMES = sorted(SLOW)
BASELINES = {"nq": 0.4, "hotpotqa/solver": -0.2}
KEYS = ("nq", "hotpotqa/solver", "new")


def arguments(batch: RaggedBatch, name: str, by_std: bool = True) -> dict[str, Any]:
    """All fields of `AdvantageInputs` but those of turns."""
    rewards = batch.rewards.abs() if name == "maxrl" else batch.rewards
    chosen = batch.log_probs("old").exp()
    baseline = algos.RunningBaseline()
    baseline.values = dict(BASELINES)
    return {
        "token_level_rewards": rewards,
        "response_mask": batch.response_mask,
        "values": batch.randn("values"),
        "index": batch.uids,
        "gamma": 0.95,
        "lam": 0.9,
        "norm_adv_by_std_in_grpo": by_std,
        "reward_baselines": batch.randn("greedy", batch.num_rows),
        "reward_components": {
            "em": batch.scores,
            "format": batch.randn("format", batch.num_rows).gt(0).float(),
        },
        "reward_weights": {"format": 0.3},
        "old_log_probs": chosen.log(),
        # the other tokens' squared probabilities: between none and that of one token that has all the rest
        "sum_pi_squared": chosen.square() + (1 - chosen).square() * (0.01 + 0.99 * batch.rand("rest")),
        "rollout_is_weights": 2.0 * batch.rand("weights"),
        "running_baseline": baseline,
        "baseline_keys": [KEYS[i % 3] for i in range(batch.num_rows)],
    }


def expected(name: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of the slow function, float64."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        return x.tolist() if isinstance(x, Tensor) else x

    rest = {key: plain(value) for key, value in arguments.items()}
    rest["baselines"] = dict(arguments["running_baseline"].values)
    rows = slow.Rows(rest["token_level_rewards"], rest["response_mask"], list(arguments["index"]), rest)
    return tuple(torch.tensor(x, dtype=torch.float64) for x in SLOW[name](rows))


def compute(name: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return advantages_of(name, **arguments)


def advantages_of(name: str, *inputs: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of the estimator, for the fields of `AdvantageInputs` that are given."""
    return algos.estimate_advantages(name, algos.AdvantageInputs(*inputs, **more))


def dirty(arguments: dict[str, Any], value: float) -> dict[str, Any]:
    """The same with `value` under every 0 of the mask, and in the figures of rows without a sampled token."""
    mask = arguments["response_mask"]
    empty = mask.sum(dim=-1) == 0

    def spoil(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: spoil(value) for key, value in x.items()}
        if not isinstance(x, Tensor) or x is mask or not x.is_floating_point():
            return x
        return x.masked_fill(empty if x.dim() == 1 else mask == 0, value)

    return {key: spoil(x) for key, x in arguments.items()}


def reordered(arguments: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The same rows in another order, or some of them."""

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[order]
        if isinstance(x, dict):
            return {key: move(value) if isinstance(value, Tensor) else value for key, value in x.items()}
        return [x[i] for i in order] if isinstance(x, list) else x

    return {key: move(x) for key, x in arguments.items()}


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)
