"""Rows shared out to processes by what they cost, common beginnings counted once."""

import numpy as np
import pytest
from transformers import Qwen2Config, Qwen3Config

from verl.trainer.ppo.balancing import attention_length_of, balanced_parts


def rows(*specifications):
    """(token, length) -> a sequence of that token: equal tokens begin alike."""
    return [np.full(length, token) for token, length in specifications]


def test_parts_hold_every_row_once_and_equally_many():
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 3, generator.integers(1, 9)) for _ in range(14)]
    for num_parts in (2, 3, 4):
        parts = balanced_parts(sequences, num_parts, 100.0)
        assert sorted(row for part in parts for row in part) == list(range(14))
        assert max(map(len, parts)) <= -(-14 // num_parts)


def test_rows_that_share_nothing_are_spread_by_cost():
    sequences = rows(*((token, length) for token, length in enumerate([500, 490, 480, 470, 9, 9, 9, 9])))
    parts = balanced_parts(sequences, 2, 1e9)
    tokens = [sum(len(sequences[row]) for row in part) for part in parts]
    assert max(tokens) / min(tokens) < 1.05


def test_attention_makes_one_long_row_as_dear_as_many_short_ones():
    sequences = rows((0, 100), (1, 50), (2, 50), (3, 50), (4, 10), (5, 10))
    by_length, by_square = (balanced_parts(sequences, 2, a) for a in (1e9, 1.0))
    assert {len(part) for part in by_length} == {3}
    assert by_square[0] == [0, 4, 5] or by_square[1] == [0, 4, 5]


def test_trajectories_of_a_prompt_stay_together_where_that_saves_more_than_it_unbalances():
    sequences = rows((7, 90), (8, 90), (7, 91), (8, 91), (7, 92), (8, 92))
    parts = balanced_parts(sequences, 2, 1e9)
    assert sorted(parts) == [[0, 2, 4], [1, 3, 5]]


def test_a_group_that_does_not_fit_is_split():
    parts = balanced_parts(rows(*[(7, 90)] * 5, (8, 10)), 2, 1e9)
    assert sorted(map(len, parts)) == [3, 3]


@pytest.mark.parametrize(
    "config, expected",
    [
        (
            Qwen2Config(
                hidden_size=8, intermediate_size=10, num_attention_heads=4, num_key_value_heads=2
            ),  # q, o: 64 each; k, v: 32 each; three of 80; over 8
            (192 + 240) / 8,
        ),
        (
            Qwen3Config(
                hidden_size=8,
                intermediate_size=10,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=16,
            ),  # four of 512, three of 80; over 64
            (2048 + 240) / 64,
        ),
    ],
)
def test_the_attention_length_follows_from_the_shapes_of_a_layer(config, expected):
    assert attention_length_of(config) == expected
