"""From the reward function's answer to the scores that are trained on.

reward function -> * search cost -> + overlong penalty -> token_level_scores [N, R]
                -> em, reward_extra (all that it returned, by name)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.data_selection import add_to_outcome, overlong_penalty, room_left
from verl.trainer.ppo.run_state import RunStopped
from verl.workers.reward_manager import RewardManager, apply_search_cost


def score(batch: DataProto, reward_fn: RewardManager, config: DictConfig) -> dict[str, float]:
    """Adds the scores of training to a batch; returns figures of them.

    Writes token_level_scores [N, R] float32 (the outcome on the last sampled token), what `row_facts` says of
    the rows, and per row `em` (float) and `reward_extra` (dict: score, before costs and penalties, and
    whatever the reward function returned).
    """
    found = reward_fn(batch, return_dict=True)
    num_searches = [trajectory["num_searches"] for trajectory in batch.non_tensor_batch["trajectory"]]
    scores = apply_search_cost(found["reward_tensor"], num_searches, config.reward_model.search_cost)
    metrics: dict[str, float] = {}
    overlong = config.reward_model.overlong_buffer
    if overlong.enable:
        max_turns = config.max_turns if config.do_search else 0
        room = room_left(batch, config.data.max_prompt_length, config.data.max_response_length, max_turns)
        penalty = overlong_penalty(room, overlong.len, overlong.penalty_factor)
        scores = add_to_outcome(scores, batch.tensors["response_mask"], penalty)
        metrics["filter/overlong_penalty"] = float(penalty.mean())
    _add_scores(batch, scores, found["em"])
    extra = _rows({name: values for name, values in found.items() if name != "reward_tensor"})
    batch.non_tensor_batch["reward_extra"] = object_array(extra)
    return metrics


def score_answers(batch: DataProto, reward_fn: RewardManager) -> DataProto:
    """The scores of a validation, without costs and penalties: what `score` adds but for reward_extra."""
    found = reward_fn(batch, return_dict=True)
    scored = batch.select(non_tensor_batch_keys=[])
    _add_scores(scored, found["reward_tensor"], found["em"])
    return scored.select(SCORES)


SCORES = ["token_level_scores", "outcome", "num_sampled", "prompt_length", "response_length"]


def _add_scores(batch: DataProto, scores: torch.Tensor, em: list[float]) -> None:
    batch.tensors["token_level_scores"] = scores
    batch.tensors.update(row_facts(batch))
    batch.non_tensor_batch["em"] = np.array(em, dtype=object)


def row_facts(batch: DataProto) -> dict[str, torch.Tensor]:
    """What the driver has to know of each row, so that it needs no token: num_sampled, prompt_length,
    response_length [N] int64 (tokens), and outcome [N] float32 if the rows are scored.
    """
    tensors = batch.tensors
    mask, attention = tensors["response_mask"], tensors["attention_mask"]
    width = mask.shape[1]
    facts = {
        "num_sampled": mask.sum(-1),
        "prompt_length": attention[:, :-width].sum(-1),
        "response_length": attention[:, -width:].sum(-1),
    }
    if "token_level_scores" in tensors:
        facts["outcome"] = tensors["token_level_scores"].sum(-1)
    return facts


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def values_named(batch: DataProto, name: str, key: str) -> np.ndarray:
    """The numbers that the reward function returned under a name, [N] float64; NaN for rows without a token.

    Raises:
        RunStopped: it returned none for a row; `key` is the configuration key that asks for them.
    """
    rows = batch.non_tensor_batch["reward_extra"]
    has_tokens = batch.tensors["num_sampled"].bool().tolist()
    values = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        if row.get(name) is not None:
            values[i] = float(row[name])
        elif has_tokens[i]:
            known = ", ".join(sorted(other for other, value in row.items() if isinstance(value, int | float)))
            raise RunStopped(
                f"{key} asks for {name!r}, but the reward function returned {known}; let it return a "
                f"dictionary with {name!r}, or change {key}."
            )
    return values


def reward_means(batch: DataProto, usable: np.ndarray) -> dict[str, float]:
    """`reward/<name>`: means over usable rows of what a reward function returned beside its score."""
    rows = batch.non_tensor_batch["reward_extra"][usable]
    numbers = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    return {
        f"reward/{name}": float(np.mean([row[name] for row in rows]))
        for name in numbers
        if name not in ("score", "em") and all(row.get(name) is not None for row in rows)
    }
