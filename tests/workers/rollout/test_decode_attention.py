"""Decode attention: however the running slots read the cache, the result is plain attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.workers.rollout.native.attention import DecodeGroup, decode_attention, plan_decode

CPU = torch.device("cpu")
CASES = {
    "all slots run": (range(6), [9, 30, 5, 1, 17, 12]),
    "holes between the running slots": ([0, 2, 3, 4, 5, 7], [9, 30, 5, 1, 17, 12]),
    "one slot far out": ([99], [40]),
    "few of many slots": ([1, 50, 99], [40, 3, 40]),
    "one long among short": (range(100), [20] * 60 + [400] + [20] * 39),
    "three lengths": (range(99), [20] * 33 + [150] * 33 + [400] * 33),
}


def _plan(slots: list[int], lengths: list[int], cache_length: int = 400) -> list[DecodeGroup]:
    return plan_decode(np.array(slots), np.array(lengths), cache_length, 128, CPU)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("case", CASES)
def test_decode_attention_equals_plain_attention(case: str, window: int | None) -> None:
    slots, lengths = (list(x) for x in CASES[case])
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 100, 2, 400, 8, generator=generator)
    query = torch.randn(len(slots), 6, 8, generator=generator)
    result = decode_attention(query, keys, values, _plan(slots, lengths), window)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        first = 0 if window is None else max(0, length - window)
        for head in range(6):
            seen = keys[slot, head // 3, first:length], values[slot, head // 3, first:length]
            expected = torch.softmax(seen[0] @ query[row, head] * 8**-0.5, -1) @ seen[1]
            torch.testing.assert_close(result[row, head * 8 : head * 8 + 8], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_every_running_slot_is_in_one_group_that_is_long_enough(case: str) -> None:
    slots, lengths = (list(x) for x in CASES[case])
    rows = []
    for group in _plan(slots, lengths):
        assert group.length >= int(group.lengths.max())
        rows += list(range(len(slots))) if group.rows is None else group.rows.tolist()
    assert sorted(rows) == list(range(len(slots)))


def test_slots_of_like_length_are_read_in_place() -> None:
    (group,) = _plan(list(range(64)), [100] * 64)
    assert group.slots == slice(0, 64)
    assert (group.scatter, group.length) == (None, 128)
    (group,) = _plan([0, *range(2, 64)], [100] * 63)
    assert group.slots == slice(0, 64)
    assert group.scatter is not None


def test_a_long_session_does_not_make_the_others_read_far() -> None:
    groups = _plan(list(range(100)), [20] * 99 + [400])
    assert [(len(group.lengths), group.length) for group in groups] == [(99, 32), (1, 400)]


def test_a_few_running_slots_do_not_read_the_idle_ones() -> None:
    (group,) = _plan([10, 90], [100, 90])
    assert isinstance(group.slots, torch.Tensor)
    assert group.slots.tolist() == [10, 90]


def test_no_group_reads_beyond_the_cache() -> None:
    assert [group.length for group in _plan([0], [399], cache_length=399)] == [399]
    assert _plan([], []) == []
