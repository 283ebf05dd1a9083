"""Columns that some losses take besides advantages, made where the whole mini-batch is known."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.protocol import DataProto


def add_prompt_counts(batch: DataProto, mini_batch_size: int) -> None:
    """Writes prompt_tokens, prompt_rows [N] int64: sampled tokens, and rows with one, of the row's uid.

    Counted within mini-batch k, the rows [k*m, (k+1)*m) for m = `mini_batch_size`: what prompt-mean divides
    by.
    """
    tokens = batch.tensors["response_mask"].sum(-1)
    totals = torch.zeros_like(tokens)
    rows = torch.zeros_like(tokens)
    uids = batch.non_tensor_batch["uid"]
    for start in range(0, len(batch), mini_batch_size):
        members: dict[str, list[int]] = {}
        for row in range(start, min(start + mini_batch_size, len(batch))):
            members.setdefault(uids[row], []).append(row)
        for same in members.values():
            totals[same] = tokens[same].sum()
            rows[same] = (tokens[same] > 0).sum()
    batch.tensors["prompt_tokens"], batch.tensors["prompt_rows"] = totals, rows


def observation_mask(batch: DataProto) -> Tensor:
    """[N, R] int64: 1 on tokens of the response that the policy read and did not sample."""
    tensors = batch.tensors
    sampled = tensors["sampled_mask" if "sampled_mask" in tensors else "response_mask"]
    return tensors["attention_mask"][:, -sampled.shape[1] :] * (1 - sampled)
