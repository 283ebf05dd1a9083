"""Columns for losses that look beyond their own row."""

import torch
from selection_batches import batch_of

from verl.trainer.ppo.update_columns import add_prompt_counts, observation_mask


def test_a_prompts_tokens_and_rows_are_counted_within_its_mini_batch():
    batch = batch_of("abaab", [1, 2, 3, 4, 0])
    add_prompt_counts(batch, 3)
    assert batch.tensors["prompt_tokens"].tolist() == [4, 2, 4, 4, 0]
    assert batch.tensors["prompt_rows"].tolist() == [2, 1, 2, 1, 0]


def test_observations_are_what_was_neither_sampled_nor_padding_also_after_a_rejection():
    batch = batch_of("ab", [4, 2], masks=[[1, 0, 0, 1], [1, 1, 0, 0]])
    expected = [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert observation_mask(batch).tolist() == expected
    batch.tensors["sampled_mask"] = batch.tensors["response_mask"]
    batch.tensors["response_mask"] = torch.zeros(2, 4, dtype=torch.long)
    assert observation_mask(batch).tolist() == expected
