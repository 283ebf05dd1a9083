"""Batch sizes of runs on few rows: ten questions need no other settings than ten thousand."""

from __future__ import annotations

from typing import Any

from verl.config import Config, SFTConfig, get_value, replace_values
from verl.config.policy import ACTOR
from verl.planning.passes import Passes


def fit_batch_sizes(config: Config, num_rows: int) -> tuple[Config, list[str]]:
    """Return a configuration whose batches are no larger than what there is to fill them.

    A step asks at most all rows, and a mini-batch has at most all trajectories of a step.

    Args:
        config: the whole configuration.
        num_rows: number of training rows, at least 1.

    Returns:
        The configuration, and a line for each size that is smaller than the one that was set.
    """
    rollout = config.actor_rollout_ref.rollout
    blocks = [ACTOR, "critic"] if Passes(config).needs_values else [ACTOR]
    num_questions = min(config.data.train_batch_size, num_rows)
    num_trajectories = num_questions * rollout.n_agent * rollout.n
    values: dict[str, Any] = {}
    notes: list[str] = []
    if num_questions < config.data.train_batch_size:
        values["data.train_batch_size"] = num_questions
        notes.append(_row_note(config.data.train_batch_size, num_rows))
    for block in blocks:
        size = get_value(config, block).ppo_mini_batch_size
        if size * rollout.n > num_trajectories:
            key = f"{block}.ppo_mini_batch_size"
            values[key] = num_trajectories // rollout.n
            notes.append(f"{key} is {values[key]}, not {size}: a step has {num_trajectories} trajectories")
    return replace_values(config, values), [] if config.trainer.val_only else notes


def fit_sft_batch_size(config: SFTConfig, num_rows: int) -> tuple[SFTConfig, list[str]]:
    """Return a configuration of supervised training whose batches have at most all rows, and the notes."""
    size = config.data.train_batch_size
    if size <= num_rows:
        return config, []
    return replace_values(config, {"data.train_batch_size": num_rows}), [_row_note(size, num_rows)]


def _row_note(size: int, num_rows: int) -> str:
    return f"data.train_batch_size is {num_rows}, not {size}: there are {num_rows} training rows"
