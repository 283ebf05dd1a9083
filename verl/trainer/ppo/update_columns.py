"""Columns that some losses take besides advantages, made where the whole mini-batch is known."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import prompt_counts


def add_prompt_counts(batch: DataProto, mini_batch_size: int) -> None:
    """Writes prompt_tokens, prompt_rows [N] int64: sampled tokens, and rows with one, of the row's uid.

    Counted within mini-batch k, the rows [k*m, (k+1)*m) for m = `mini_batch_size`: what prompt-mean divides
    by.
    """
    mask, uids = batch.tensors["response_mask"], batch.non_tensor_batch["uid"]
    mini_batches = [slice(start, start + mini_batch_size) for start in range(0, len(batch), mini_batch_size)]
    counts = [prompt_counts(mask[part], uids[part]) for part in mini_batches]
    tokens, rows = (torch.cat(count) for count in zip(*counts, strict=True))
    batch.tensors["prompt_tokens"], batch.tensors["prompt_rows"] = tokens, rows


def observation_mask(batch: DataProto) -> Tensor:
    """[N, R] int64: 1 on tokens of the response that the policy read and did not sample."""
    tensors = batch.tensors
    sampled = tensors["sampled_mask" if "sampled_mask" in tensors else "response_mask"]
    return tensors["attention_mask"][:, -sampled.shape[1] :] * (1 - sampled)
