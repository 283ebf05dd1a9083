"""Which of a step's trajectories are learnt from, and what is taken off a score for nearing the limit.

    scored rows -> usable_rows -> informative_rows -> the update
    too few groups left, and `refill` -> prompts_to_draw -> more rows

Pure functions of a scored batch; `collection.py` calls them. What is left out here is out of every statistic
too: of the group's mean, of the counts that losses are divided by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto

LENGTH = "length"  # finish reason of a trajectory that a limit has cut


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
