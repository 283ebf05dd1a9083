"""Rows of turns: what each holds, and the way back to trajectories."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.packing.packs import pack_rows
from verl.packing.turn_rows import FIRST_COLUMN, TRAJECTORY, rows_of, rows_to_trajectories, split_into_turns

# sampled tokens and the observation's behind them, of each turn of each trajectory
TURNS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=8), min_size=1
)


def batch_of(trajectories, prompt_width=3):
    """Ids that are all different; row i has a prompt of 1 + i % 3 tokens. (batch, turn_ids)"""
    width = max(sum(map(sum, turns)) for turns in trajectories)
    attention = torch.zeros(len(trajectories), prompt_width + width, dtype=torch.int64)
    turn_ids = torch.full((len(trajectories), width), -1)
    for row, turns in enumerate(trajectories):
        end = 0
        for number, (sampled, observed) in enumerate(turns):
            turn_ids[row, end : end + sampled] = number
            end += sampled + observed
        attention[row, prompt_width - 1 - row % prompt_width : prompt_width + end] = 1
    ids = torch.arange(1, attention.numel() + 1).view(attention.shape)
    batch = {
        "input_ids": ids * attention,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": (turn_ids >= 0).long(),
        "advantages": ids[:, prompt_width:] / 7,
    }
    return batch, turn_ids


def test_the_worked_example():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 2]]),
        "attention_mask": torch.ones(1, 6, dtype=torch.int64),
        "position_ids": torch.arange(6)[None],
        "response_mask": torch.tensor([[1, 0, 1, 1]]),
        "prompt_rows": torch.tensor([1]),
    }
    rows = split_into_turns(batch, torch.tensor([[0, -1, 1, 1]]))
    assert rows["input_ids"].tolist() == [[0, 0, 5, 6, 7, 0], [5, 6, 7, 8, 9, 2]]
    assert rows["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert rows[TRAJECTORY].tolist() == [0, 0] and rows[FIRST_COLUMN].tolist() == [0, 2]
    assert rows["prompt_rows"].tolist() == [2, 2]
    with_echo = split_into_turns(
        batch | {"extra_loss_mask": torch.tensor([[0, 1, 0, 0]])}, torch.tensor([[0, -1, 1, 1]])
    )
    assert with_echo["input_ids"].tolist() == [[0, 0, 5, 6, 7, 8], [5, 6, 7, 8, 9, 2]]
    assert with_echo["extra_loss_mask"].tolist() == [[0, 1], [0, 0]]


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_a_row_holds_the_context_and_the_tokens_of_its_turn(trajectories):
    batch, turn_ids = batch_of(trajectories)
    rows = split_into_turns(batch, turn_ids)
    numbers = [(row, turn) for row, turns in enumerate(trajectories) for turn in range(len(turns))]
    assert rows[TRAJECTORY].tolist() == [row for row, _ in numbers]
    width = rows["response_mask"].shape[1]
    for place, (row, turn) in enumerate(numbers):
        own = (turn_ids[row] == turn).nonzero().flatten()
        end = len(batch["input_ids"][row]) - turn_ids.shape[1] + int(own[-1]) + 1
        real = batch["attention_mask"][row, :end].bool()
        for name in ("input_ids", "position_ids"):
            kept = rows[name][place][rows["attention_mask"][place].bool()]
            assert kept.tolist() == batch[name][row, :end][real].tolist()
        mask = rows["response_mask"][place].bool()
        assert mask.tolist() == [True] * len(own) + [False] * (width - len(own))
        assert torch.equal(rows["advantages"][place][mask], batch["advantages"][row, own])
    back = rows_to_trajectories(rows["advantages"], rows, turn_ids.shape)
    sampled = turn_ids >= 0
    assert torch.equal(back[sampled], batch["advantages"][sampled]) and back[~sampled].isnan().all()
    halves = np.array_split(np.arange(len(trajectories)), 2)
    assert sum((rows_of(half.tolist(), rows) for half in halves), []) == list(range(len(numbers)))


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_a_pack_of_rows_is_one_sequence_for_each_trajectory(trajectories):
    """As long as it is without its last observation; attention sees what it sees of trajectories."""
    batch, turn_ids = batch_of(trajectories)
    rows = split_into_turns(batch, turn_ids)
    packed = pack_rows(rows, range(len(rows[TRAJECTORY])), "cpu")
    prompts = batch["attention_mask"][:, : -turn_ids.shape[1]].sum(1).tolist()
    lengths = [
        prompt + sum(map(sum, turns)) - turns[-1][1]
        for prompt, turns in zip(prompts, trajectories, strict=True)
    ]
    assert sorted(packed.packing.seq_lens) == sorted(packed.packing.key_lens) == sorted(lengths)
    assert len(packed.labels) == int((turn_ids >= 0).sum())


def test_a_trajectory_without_a_loss_token_is_its_prompt_alone():
    batch, turn_ids = batch_of([[(2, 1), (1, 0)], [(3, 0)]])
    batch["response_mask"][0] = 0
    rows = split_into_turns(batch, turn_ids)
    assert rows[TRAJECTORY].tolist() == [0, 1]
    assert rows["attention_mask"].sum(1).tolist() == [1, 2 + 3]
