"""What the advantage estimators take besides rewards and mask, from a step's batch.

    trajectory records -> turn_ids [N, R], turn_rewards [N, T]
    reward_extra       -> reward_components

Only what `Passes.estimator_inputs` names is made. Values, old log-probs and greedy scores are columns of the
batch that earlier passes have written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algos.advantages import AdvantageInputs, RunningBaseline
from verl.config.schema import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.run_state import RunStopped
from verl.trainer.ppo.scoring import values_named
from verl.utils.reward_score.qa_em import documents_hold_answer, golden_answers

COLUMNS = ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "reward_baselines")


def add_advantages(
    batch: DataProto,
    algorithm: AlgorithmConfig,
    passes: Passes,
    kl_controller: FixedKLController,
    running_baseline: RunningBaseline,
) -> dict[str, float]:
    """Adds rewards, advantages and returns to a step's batch; which tokens the update leaves out, and how it
    weighs the others. Returns metrics.

    Raises:
        RunStopped: rewards that the estimator can't take.
    """
    tensors = batch.tensors
    metrics = core_algos.apply_rollout_correction(batch, algorithm.rollout_correction)
    if passes.kl_in_reward:
        metrics |= core_algos.apply_kl_penalty(batch, kl_controller, algorithm.kl_penalty)
    else:
        tensors["token_level_rewards"] = tensors["token_level_scores"]
    inputs = advantage_inputs(batch, algorithm, passes, running_baseline)
    try:
        advantages, returns = core_algos.compute_advantage(algorithm.adv_estimator, inputs)
    except ValueError as error:
        raise RunStopped(f"the advantages of this step: {error}") from error
    tensors["advantages"], tensors["returns"] = advantages, returns
    if inputs.baseline_keys is not None:
        mask = tensors["response_mask"]
        running_baseline.update(tensors["token_level_rewards"], mask, inputs.baseline_keys)
    core_algos.take_out_rejected(batch)
    return metrics


def advantage_inputs(
    batch: DataProto, algorithm: Mapping[str, Any], passes: Passes, running_baseline: RunningBaseline
) -> AdvantageInputs:
    """What estimators are made of: of the batch all that it has, of the records what is asked for.

    Args:
        batch: all rows of the step, with token_level_rewards and what the passes have written.
        algorithm: the `algorithm` block.
    """
    tensors, wanted = batch.tensors, passes.estimator_inputs
    inputs: dict[str, Any] = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "index": batch.non_tensor_batch["uid"],
        "config": algorithm,
        "turn_credit": passes.turn_credit,
        **{name: algorithm[name] for name in ("gamma", "lam", "norm_adv_by_std_in_grpo")},
        **{name: tensors[name] for name in COLUMNS if name in tensors},
    }
    if "running_baseline" in wanted:
        inputs |= {"running_baseline": running_baseline, "baseline_keys": baseline_keys(batch)}
    if "reward_components" in wanted:
        inputs["reward_components"] = reward_components(batch, passes.reward_keys)
        weights = algorithm["gdpo_reward_weights"] or [1.0] * len(passes.reward_keys)
        inputs["reward_weights"] = dict(zip(passes.reward_keys, weights, strict=True))
    if passes.turn_credit or "turn_ids" in wanted:
        inputs["turn_ids"] = turn_ids(batch)
    if passes.turn_credit or "turn_rewards" in wanted:
        inputs["turn_rewards"] = turn_rewards(batch)
    return AdvantageInputs(**inputs)


def baseline_keys(batch: DataProto) -> list[str]:
    """Whose running mean each row belongs to: its data source's."""
    return [str(source) for source in batch.non_tensor_batch["data_source"]]


def reward_components(batch: DataProto, names: tuple[str, ...]) -> dict[str, Tensor]:
    """name -> [N] float32, numbers that the reward function returned (`algorithm.gdpo_reward_keys`); NaN for
    rows without a token, which no estimator looks at.
    """
    columns = {name: values_named(batch, name, "algorithm.gdpo_reward_keys") for name in names}
    return {name: torch.from_numpy(values).float() for name, values in columns.items()}


def turn_ids(batch: DataProto) -> Tensor:
    """[N, R] int64: the number of the turn, from 0, that each sampled token belongs to; -1 elsewhere.

    From the spans in the trajectories' records, so that turns are told apart however they border.
    """
    mask = batch.tensors["response_mask"].bool()
    ids = torch.full(mask.shape, -1, dtype=torch.int64)
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        for number, turn in enumerate(record["turns"]):
            ids[row, turn["start"] : turn["end"]] = number
    return ids.masked_fill(~mask, -1)


def turn_rewards(batch: DataProto) -> Tensor:
    """[N, T] float32: the reward of each turn, NaN where it has none of its own; T is the most turns of a
    row.

    A reward function that returns `turn_rewards` (a list, one number or None a turn) decides. Else a search
    is worth 1 if it is the trajectory's first whose documents hold a golden answer and 0 if not, so that
    asking again wins nothing; other turns have no reward of their own.
    """
    fields = batch.non_tensor_batch
    rows = []
    for record, extra, reward_model in zip(
        fields["trajectory"], fields["reward_extra"], fields["reward_model"], strict=True
    ):
        given = extra.get("turn_rewards")
        rows.append(_first_hits(record, reward_model["ground_truth"]) if given is None else list(given))
        if len(rows[-1]) != len(record["turns"]):
            raise RunStopped(
                f"the reward function returned {len(rows[-1])} turn_rewards for a trajectory of "
                f"{len(record['turns'])} turns; expected one number (or None) a turn"
            )
    width = max(1, *map(len, rows)) if rows else 1
    table = [[math.nan if value is None else float(value) for value in row] for row in rows]
    return torch.tensor([row + [math.nan] * (width - len(row)) for row in table], dtype=torch.float32)


def _first_hits(record: Mapping[str, Any], ground_truth: Any) -> list[float | None]:
    has_golden = isinstance(ground_truth, Mapping) and ground_truth.get("target") is not None
    golden = golden_answers(ground_truth) if has_golden else []
    rewards: list[float | None] = []
    found = False
    for turn in record["turns"]:
        if not golden or turn["documents"] is None:
            rewards.append(None)
            continue
        hit = not found and documents_hold_answer(turn["documents"], golden)
        found = found or hit
        rewards.append(float(hit))
    return rewards
