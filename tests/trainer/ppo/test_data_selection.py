"""Which rows are learnt from, and what nearing the limit costs."""

import numpy as np
import pytest
from selection_batches import batch_of, record, turn

from verl.trainer.ppo.collection import usable_rows
from verl.trainer.ppo.prompt_selector import informative_rows
from verl.trainer.ppo.scoring import overlong_penalty, room_left


def test_the_last_one_that_is_left_of_a_group_has_nothing_to_be_compared_with():
    batch = batch_of("aabbbc", [3, 0, 2, 2, 0, 5])
    assert usable_rows(batch, True).tolist() == [False, False, True, True, False, True]
    assert usable_rows(batch, False).tolist() == [True, False, True, True, False, True]


def test_trajectories_that_a_limit_has_cut_take_no_part_with_the_overlong_filter():
    records = [record(reason) for reason in ("answer", "length", "eos", "length", "max_turns", "answer")]
    batch = batch_of("aabbbb", [2] * 6, records)
    assert usable_rows(batch, True).all()
    assert usable_rows(batch, True, overlong_filter=True).tolist() == [False, False, True, False, True, True]
    assert usable_rows(batch, False, overlong_filter=True).tolist() == [True, False, True, False, True, True]


def test_only_groups_whose_members_differ_are_informative():
    scores = np.array([1.0, 1, 0, 1, 0, 0, 7])
    uids = np.array(list("aabbccd"), dtype=object)
    usable = np.ones(7, dtype=bool)
    chosen = informative_rows(scores, uids, usable)
    assert chosen.tolist() == [False, False, True, True, False, False, False]


def test_with_several_rewards_one_that_differs_is_enough():
    values = np.array([[1.0, 0], [1, 1], [0, 0], [0, 0]])
    uids = np.array(list("aabb"), dtype=object)
    chosen = informative_rows(values, uids, np.ones(4, dtype=bool))
    assert chosen.tolist() == [True, True, False, False]


def test_the_room_ends_at_the_context_or_in_the_last_turn_at_the_turns_limit():
    records = [
        record("answer", [turn(0, 6)]),  # 2 + 6 of 20: 12 left; not yet the last turn
        record("answer", [turn(0, 1), turn(2, 3), turn(3, 8)]),  # the last turn has 5 of 9
        record("length", [turn(0, 3)]),  # an observation did not fit
        record("eos", [turn(0, 2), turn(3, 4), turn(5, 17)]),  # context and turn are over their limits
    ]
    room = room_left(batch_of("abcd", [6, 8, 3, 19], records), max_context=20, max_turn=9, max_turns=2)
    assert room.tolist() == [12, 4, 0, 0]


def test_the_soft_overlong_penalty_is_that_of_dapos_equation_13():
    longest = 50
    cache = 16

    def equation_13(length: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    lengths = np.arange(60)
    expected = [2.5 * equation_13(length) for length in lengths]
    room = np.maximum(longest - lengths, 0)
    assert overlong_penalty(room, cache, 2.5) == pytest.approx(expected, abs=1e-12)
