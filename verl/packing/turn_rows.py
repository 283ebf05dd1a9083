"""Turns of a trajectory as training rows (`rollout.step_wise`).

The prompt of such a row is the context that the turn saw, and the response are the tokens that it sampled.

    trajectory   prompt | turn 0 | observation | turn 1 | observation | turn 2
    row 0        prompt | turn 0
    row 1        prompt   turn 0   observation | turn 1
    row 2        prompt   turn 0   observation   turn 1   observation | turn 2

Everything up to the advantages is computed on whole trajectories, and mini-batches are sets of trajectories.
The rows are made just before the loss. A row is the beginning of the next, and a pack
(`verl/packing/packs.py`) computes every token once, so the cost is that of the trajectory.

Legend: N trajectories, M rows, P prompt and R response width of the trajectories, W context and S response
width of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TRAJECTORY = "trajectory_of_row"  # [M] int64, ascending: which trajectory the row is a turn of
FIRST_COLUMN = "first_column"  # [M] int64: where its response begins in the trajectory's response


def split_into_turns(batch: Mapping[str, Tensor], turn_ids: Tensor) -> dict[str, Tensor]:
    """Return the rows of a batch of trajectories, in the order of trajectories and of their turns.

    A turn's row has the trajectory's own ids, positions and columns (advantages, log-probs, ..) where the
    turn sampled. If a loss learns from an observation (`extra_loss_mask`), the observation belongs to the
    response of the turn that it answers. Otherwise it belongs only to the context of the next turn. A turn
    without a loss token has no row. If a trajectory has no loss token at all, its prompt alone is a row, so
    that every process has one.

    Args:
        batch: input_ids, attention_mask, position_ids [N, P+R], response_mask [N, R] and any columns [N, R]
            or [N]; `prompt_rows` [N] counts turns instead of trajectories in the result.
        turn_ids: [N, R] int64, the turn of each sampled token, ascending in a row; -1 elsewhere.

    Example, one trajectory: prompt [5, 6], response [7, 8, 9, 2] with response_mask [1, 0, 1, 1] and turn_ids
    [0, -1, 1, 1]. input_ids become [0, 0, 5, 6, 7, 0] and [5, 6, 7, 8, 9, 2], with response_mask [1, 0] and
    [1, 1] (W = 4, S = 2), trajectory_of_row [0, 0], first_column [0, 2].
    """
    num_rows, width = turn_ids.shape
    prompt_width = batch["input_ids"].shape[1] - width
    turns = turn_ids.cummax(dim=1).values.clamp(min=0)  # the tokens after a turn count as part of it
    in_loss = batch["response_mask"].bool()
    if "extra_loss_mask" in batch:
        in_loss = in_loss | batch["extra_loss_mask"].bool()
    num_turns = int(turns.max()) + 1
    starts = torch.searchsorted(turns, torch.arange(num_turns).repeat(num_rows, 1))
    ends = torch.where(in_loss, torch.arange(1, width + 1), 0)  # the column after each loss token
    ends = torch.zeros_like(starts).scatter_reduce(1, turns, ends, "amax")
    is_row = ends > 0
    is_row[:, 0] |= ~is_row.any(dim=1)
    trajectory, turn = is_row.nonzero(as_tuple=True)
    start = starts[trajectory, turn]
    end = ends[trajectory, turn]
    end = torch.maximum(start, end)

    context = int(start.max())
    response = max(int((end - start).max()), 1)
    # the column of the trajectory for each column of the rows, counted from the response's beginning
    positions = start[:, None] + torch.arange(-prompt_width - context, response)
    valid = (positions >= -prompt_width) & (positions < end[:, None])
    positions = positions.clamp(min=-prompt_width, max=width - 1)
    rows: dict[str, Tensor] = {TRAJECTORY: trajectory, FIRST_COLUMN: start}
    for name, column in batch.items():
        values = column if column.dim() > 1 else column[trajectory]
        if column.dim() > 1:
            span = slice(-response, None) if column.shape[1] == width else slice(None)
            offset = 0 if column.shape[1] == width else prompt_width
            values = column[trajectory[:, None], positions[:, span] + offset].masked_fill(~valid[:, span], 0)
        rows[name] = values
    if "prompt_rows" in rows:
        has_sampled = rows["response_mask"].bool().any(dim=1)
        rows["prompt_rows"] = (
            rows["prompt_rows"] * torch.bincount(trajectory[has_sampled], minlength=num_rows)[trajectory]
        )
    return rows


def rows_to_trajectories(column: Tensor, rows: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """Return from rows to trajectories: column [M, S] -> [N, R] (`shape`), NaN where nothing was sampled."""
    row, position = rows["response_mask"].nonzero(as_tuple=True)
    result = column.new_full(tuple(shape), torch.nan)
    result[rows[TRAJECTORY][row], rows[FIRST_COLUMN][row] + position] = column[row, position]
    return result


def rows_of(trajectories: Sequence[int], rows: Mapping[str, Tensor]) -> list[int]:
    """Return the rows of some consecutive trajectories; without turns a row is a trajectory."""
    if TRAJECTORY not in rows or not trajectories:
        return list(trajectories)
    bounds = torch.tensor([trajectories[0], trajectories[-1] + 1])
    first, end = torch.searchsorted(rows[TRAJECTORY], bounds).tolist()
    return list(range(first, end))
