"""Packed micro-batches: what is in them, and how rows are split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.packing.packs import pack_rows, plan_padded


def example(pad=0):
    """The worked example of PackedMicroBatch, and a second row whose prompt is shorter."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0]])
    return {
        "input_ids": torch.tensor([[pad, 5, 6, 7, 8, 9, 2, pad], [pad, pad, 4, 3, 2, pad, pad, pad]]),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]]),
    }


def test_the_worked_example_packs_as_its_docstring_says():
    packed = pack_rows(example(), [0], "cpu")
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert packed.packing.seq_lens == (6,) and packed.packing.cu_seqlens.tolist() == [0, 6]
    assert packed.predicted_from.tolist() == [1, 2, 4]
    assert packed.labels.tolist() == [7, 8, 2]
    assert packed.packing.key_index is None and packed.distinct is None
    assert packed.cells.tolist() == [0, 1, 3] and packed.sampled.tolist() == [True] * 3
    assert packed.shape == (1, 5)
    assert packed.mask.tolist() == [[True, True, False, True, False]]


def test_a_second_row_adds_only_what_the_first_has_not():
    """The worked example's second part: [5, 6, 7, 8, 9, 2] and [5, 6, 7, 8, 9, 3]."""
    batch = {key: value[[0, 0]] for key, value in example().items()}
    batch["input_ids"][1, 6] = 3
    packed = pack_rows(batch, [0, 1], "cpu")
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 2, 3]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 5]]
    assert packed.packing.seq_lens == (6, 1) and packed.packing.key_lens == (6, 6)
    assert packed.packing.key_index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6]
    assert packed.predicted_from.tolist() == [1, 2, 4, 4] and packed.labels.tolist() == [7, 8, 2, 3]
    assert packed.cells.tolist() == [0, 1, 3, 5, 6, 8] and packed.distinct.tolist() == [0, 1, 2, 0, 1, 3]
    assert packed.unpack(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 2, 0, 3, 0], [1, 2, 0, 4, 0]]


def test_tokens_of_the_extra_loss_mask_become_loss_tokens_that_were_not_sampled():
    batch = example() | {"extra_loss_mask": torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])}
    for padded in (False, True):
        packed, plain = (pack_rows(b, [0, 1], "cpu", padded) for b in (batch, example()))
        assert packed.sampled.tolist() == [True, True, False, True, True, True]
        assert torch.equal(packed.mask, plain.mask) and plain.extra_mask.sum() == 0
        assert packed.extra_mask.tolist() == [[False, False, True, False, False], [False] * 5]
        assert packed.labels.tolist() == [7, 8, 9, 2, 3, 2]
        assert torch.equal(packed.predicted_from[packed.sampled], plain.predicted_from)
    batch["extra_loss_mask"][0, 4] = 1
    with pytest.raises(ValueError, match="extra_loss_mask marks a token that attention_mask calls padding"):
        pack_rows(batch, [0], "cpu")


def test_rows_stand_end_to_end_in_the_order_asked_for():
    packed = pack_rows(example(), [1, 0], "cpu")
    assert packed.input_ids.tolist() == [[4, 3, 2, 5, 6, 7, 8, 9, 2]]
    assert packed.packing.cu_seqlens.tolist() == [0, 3, 9]
    assert packed.predicted_from.tolist() == [0, 1, 4, 5, 7]
    assert packed.labels.tolist() == [3, 2, 7, 8, 2]
    assert packed.unpack(torch.arange(1.0, 6.0)).tolist() == [[1, 2, 0, 0, 0], [3, 4, 0, 5, 0]]


@pytest.mark.parametrize("pad", [2, 5, 7])
def test_rule_2_a_pad_id_that_is_also_eos_or_part_of_the_text_changes_nothing(pad):
    """2 ends both rows, 5 starts a prompt, 7 is a sampled token: padding with any of them is the same
    batch.
    """
    for padded in (False, True):
        ours, plain = (pack_rows(example(p), [0, 1], "cpu", padded) for p in (pad, 0))
        assert torch.equal(ours.input_ids, plain.input_ids) and torch.equal(ours.labels, plain.labels)
        assert (
            torch.equal(ours.predicted_from, plain.predicted_from)
            and ours.packing.seq_lens == plain.packing.seq_lens
        )


def test_a_sampled_token_needs_a_token_before_it():
    batch = example()
    batch["attention_mask"][1, 2] = 0
    batch["attention_mask"][1, 3] = 1
    with pytest.raises(ValueError, match="a prompt of at least one token"):
        pack_rows(batch, [1], "cpu")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=30),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 120),
)
def test_a_padded_plan_has_every_row_once_and_keeps_its_limits(lengths, max_rows, max_tokens):
    plan = plan_padded(lengths, max_rows, max_tokens)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        sizes = [lengths[row] for row in part]
        assert max_rows is None or len(part) <= max_rows
        assert max_tokens is None or max(sizes) * len(sizes) <= max_tokens or len(part) == 1
