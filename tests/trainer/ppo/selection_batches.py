"""Small scored batches for tests of data selection: one letter a group, one entry a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.scoring import score_answers


def turn(start: int, end: int, documents: list[str] | None = None) -> dict[str, Any]:
    found = None if documents is None else [{"contents": text} for text in documents]
    return {"start": start, "end": end, "documents": found}


def record(finish_reason: str = "answer", turns: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "turns": turns or [], "num_searches": 0}


def batch_of(
    uids: str,
    lengths: list[int],
    records: list[dict[str, Any]] | None = None,
    extra: list[dict[str, Any]] | None = None,
    masks: list[list[int]] | None = None,
    prompt: int = 2,
) -> DataProto:
    """Row i has `lengths[i]` response tokens, all sampled unless `masks` says otherwise."""
    width = max(lengths)
    real = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    mask = real if masks is None else torch.tensor(masks)
    num_rows = len(uids)
    columns = {
        "uid": np.array(list(uids), dtype=object),
        "trajectory": object_array(records or [record() for _ in uids]),
        "reward_extra": object_array(extra or [{} for _ in uids]),
        "reward_model": object_array([{"ground_truth": {"target": ["Oslo"]}}] * num_rows),
        "data_source": object_array(["nq"] * num_rows),
        "index": object_array([ord(uid) - ord("a") for uid in uids]),
    }
    tensors = {
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(num_rows, prompt, dtype=torch.long), real], dim=1),
    }
    batch = DataProto.from_dict(tensors, columns)
    nothing = [0.0] * num_rows
    answers = {"reward_tensor": torch.zeros(mask.shape), "em": nothing, "f1": nothing, "score": nothing}
    score_answers(batch, lambda *_, **__: answers)
    return batch
