"""From the reward function's answer to the scores that are trained on, and which rows they may be trained on.

    reward function -> * search cost -> + overlong penalty -> token_level_scores [N, R]
                    -> em, reward_extra (all that it returned, by name)
    scored rows -> usable_rows -> informative_rows -> the update

What is left out here is out of every statistic too: of the group's mean, of the counts that losses are
divided by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config import Config
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.run_state import RunStopped
from verl.workers.reward_manager import RewardFunctionFailed, RewardManager, apply_search_cost

LENGTH = "length"  # finish reason of a trajectory that a limit has cut


def score(batch: DataProto, reward_fn: RewardManager, config: Config) -> None:
    """Adds the scores of training to a batch.

    Writes token_level_scores [N, R] float32 (the outcome on the last sampled token), what `row_facts` says of
    the rows, and per row `em` (float) and `reward_extra` (dict: score, before costs and penalties, and
    whatever the reward function returned). Metrics go to meta_info `metrics`.
    """
    answers = _answers(batch, reward_fn)
    num_searches = [trajectory["num_searches"] for trajectory in batch.non_tensor_batch["trajectory"]]
    scores = apply_search_cost(answers.pop("reward_tensor"), num_searches, config.reward_model.search_cost)
    overlong = config.reward_model.overlong_buffer
    if overlong.enable:
        max_turns = config.max_turns if config.do_search else 0
        room = room_left(batch, config.data.max_prompt_length, config.data.max_response_length, max_turns)
        penalty = overlong_penalty(room, overlong.len, overlong.penalty_factor)
        scores = add_to_outcome(scores, batch.tensors["response_mask"], penalty)
        batch.meta_info.setdefault("metrics", {})["filter/overlong_penalty"] = float(penalty.mean())
    _add_scores(batch, scores, answers["em"])
    rows = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    batch.non_tensor_batch["reward_extra"] = object_array(rows)


def score_answers(batch: DataProto, reward_fn: RewardManager) -> None:
    """Adds what `score` adds but for reward_extra, without costs and penalties: for a validation."""
    answers = _answers(batch, reward_fn)
    _add_scores(batch, answers["reward_tensor"], answers["em"])


def _answers(batch: DataProto, reward_fn: RewardManager) -> dict[str, Any]:
    try:
        return reward_fn(batch, return_dict=True)
    except RewardFunctionFailed as error:
        raise RunStopped(str(error)) from error


def _add_scores(batch: DataProto, scores: Tensor, em: list[float]) -> None:
    batch.tensors["token_level_scores"] = scores
    batch.tensors.update(row_facts(batch))
    batch.non_tensor_batch["em"] = np.array(em, dtype=object)


def row_facts(batch: DataProto) -> dict[str, Tensor]:
    """num_sampled, prompt_length, response_length [N] int64 (tokens), and outcome [N] float32 if the rows are
    scored.
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


def usable_rows(batch: DataProto, compares_group: bool, overlong_filter: bool = False) -> np.ndarray:
    """Rows that may be learnt from, as a boolean array [N]: those with at least one sampled token.

    A trajectory whose search failed, or that was not waited for, has none (its response_mask is all zero).
    `overlong_filter` leaves out those that a limit of length has cut too: their reward says nothing about
    what they would have come to (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4). With
    `compares_group` (the advantage is relative to the rows of the same uid) the last one that is left of a
    group is not usable either: without others to compare it with, its advantage would be its bare score.
    """
    usable = (batch.tensors["num_sampled"] > 0).numpy()
    if overlong_filter:
        records = batch.non_tensor_batch["trajectory"]
        usable &= np.array([record["finish_reason"] != LENGTH for record in records], dtype=bool)
    if compares_group:
        group = _group_numbers(batch.non_tensor_batch["uid"])
        usable &= (np.bincount(group, usable)[group] > 1) | (np.bincount(group)[group] == 1)
    return usable


def informative_rows(values: np.ndarray, uids: Sequence[Any] | np.ndarray, usable: np.ndarray) -> np.ndarray:
    """The usable rows of groups whose members differ in some value; [N] bool.

    A group whose members all have the same reward gives every token an advantage of 0 (DAPO's dynamic
    sampling, arXiv:2503.14476, eq. 11, leaves out groups that are all right or all wrong).

    Args:
        values: [N] or [N, K] float, the K numbers that are compared; rows that are not usable are not read.
        uids: the group of each row. usable: [N] bool.
    """
    values = values.reshape(len(values), -1)
    group = _group_numbers(uids)
    highest = np.full(values.shape, -np.inf)
    lowest = np.full(values.shape, np.inf)
    np.maximum.at(highest, group[usable], values[usable])
    np.minimum.at(lowest, group[usable], values[usable])
    differs: np.ndarray = np.any(highest > lowest, axis=1)
    return usable & differs[group]


def count_groups(uids: np.ndarray, rows: np.ndarray) -> int:
    """Groups that have at least one of the `rows` [N] bool."""
    return len(set(uids[rows]))


def prompts_to_draw(num_wanted: int, num_found: int, num_drawn: int) -> int:
    """How many prompts to ask next, so that about `num_wanted` informative groups are there afterwards.

    As many as the share found so far says are needed, at least one, and never more than `num_wanted`: a step
    generates no more at once than it would without a filter.
    """
    share = max(num_found, 1) / num_drawn
    return min(num_wanted, max(1, math.ceil((num_wanted - num_found) / share)))


def room_left(batch: DataProto, max_context: int, max_turn: int, max_turns: int) -> np.ndarray:
    """How many more tokens each policy could have written before a limit had cut it; [N] int64, at least 0.

    A trajectory is cut when its context (prompt, turns, observations) reaches `max_context` tokens, or when
    its last turn, the one after `max_turns` others, reaches `max_turn`. 0 for one that was cut, also where an
    observation that did not fit has cut it.
    """
    context = batch.tensors["attention_mask"].sum(-1).tolist()
    room = np.maximum(max_context - np.array(context, dtype=np.int64), 0)
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        turns = record["turns"]
        if record["finish_reason"] == LENGTH:
            room[row] = 0
        elif len(turns) > max_turns:
            room[row] = min(room[row], max(max_turn - (turns[-1]["end"] - turns[-1]["start"]), 0))
    return room


def overlong_penalty(room: np.ndarray, buffer_length: int, factor: float) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13) times `factor`; [N] float64, from -factor
    to 0.

    0 while at least `buffer_length` tokens are left, then falling evenly to -1 where none is: with |y| the
    length, L_max where it is cut and L_cache the buffer, (L_max - L_cache - |y|) / L_cache. The paper's one
    limit is the response's; an agent's context holds retrieved text as well, so what counts is the room that
    is left, L_max - |y|, which is the same number however the observations are counted.
    """
    return factor * np.clip((room - buffer_length) / buffer_length, -1.0, 0.0)


def add_to_outcome(scores: Tensor, response_mask: Tensor, amounts: np.ndarray) -> Tensor:
    """[N, R]: `scores` with each row's amount [N] added on its last sampled token, if it has one."""
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    last = columns.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    amount = torch.from_numpy(amounts).to(scores.dtype).unsqueeze(1)
    return scores.scatter_add(1, last.clamp(min=0), torch.where(last >= 0, amount, 0.0))


def solve_rates(batch: DataProto, scores: np.ndarray, usable: np.ndarray) -> dict[int, float]:
    """Row of the data set -> mean score of its usable trajectories; prompts without one are left out."""
    rows: dict[int, list[float]] = {}
    for index, score, is_usable in zip(batch.non_tensor_batch["index"], scores, usable, strict=True):
        if is_usable:
            rows.setdefault(int(index), []).append(float(score))
    return {row: sum(found) / len(found) for row, found in rows.items()}


def _group_numbers(uids: Sequence[Any] | np.ndarray) -> np.ndarray:
    return np.unique(np.asarray(uids).astype(str), return_inverse=True)[1].reshape(-1)
