"""Rows that go on in a later step, in a checkpoint: plain values that are read without running anything.

An environment that is in the middle of an episode could only be kept as a pickle, which runs what it names.
So such an episode begins again from its prompt when a run resumes; the other rows of its group go on
(`TrajectoryService.snapshot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from verl.protocol import DataProto, object_array
from verl.utils.plain_state import load_plain, save_plain
from verl.workers.engine.snapshot import CheckpointFailed

_BATCH = "$batch"  # marks the dictionary that stands for a DataProto


def save_rows(path: Path, state: Any) -> None:
    """Write nested values, with batches among them, into a file.

    Raises CheckpointFailed if a value is not plain data.
    """
    try:
        save_plain(path, _without_batches(state))
    except TypeError as error:
        raise CheckpointFailed(f"rows that go on can't be written: {error}") from error


def load_rows(path: Path) -> Any:
    """Return what `save_rows` wrote. Raises ValueError if the file is damaged."""
    state = load_plain(path)
    try:
        return _with_batches(state)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error})") from error


def _without_batches(value: Any) -> Any:
    if isinstance(value, DataProto):
        tensors = None if value.batch is None else dict(value.batch.items())
        columns = {"num_rows": len(value), "columns": value.non_tensor_batch, "meta_info": value.meta_info}
        return {_BATCH: True, "tensors": tensors, **columns}
    if isinstance(value, Mapping):
        return {key: _without_batches(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_batches(item) for item in value]
    return value


def _with_batches(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_batches(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _BATCH not in value:
        return {key: _with_batches(item) for key, item in value.items()}
    tensors = value["tensors"]
    batch = None if tensors is None else TensorDict(tensors, batch_size=[value["num_rows"]])
    return DataProto(batch, value["columns"], value["meta_info"])


def continuations(batch: DataProto) -> np.ndarray:
    """Return what the agent goes on with, [N] of dict.

    Each dict has ids, mask and log-probs without padding, and the `record`.
    """
    tensors = batch.tensors
    lengths = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].sum(-1).tolist()
    names = {"response_ids": "responses", "response_mask": "response_mask", "log_probs": "rollout_log_probs"}
    return object_array(
        [
            {name: tensors[column][row, :length].tolist() for name, column in names.items()}
            | {"record": batch.non_tensor_batch["trajectory"][row]}
            for row, length in enumerate(lengths)
        ]
    )
