"""Rows on their way to the workers: seeds, groups, and the same mini-batches for any number of processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_config import config_with
from selection_batches import batch_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.planning.passes import Passes, num_mini_batches
from verl.protocol import DataProto
from verl.trainer.ppo.batching import arrange_for_workers, attention_length, balanced_parts
from verl.trainer.ppo.collection import prompt_batch, sampling_seeds
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.engine.update_loop import mini_batches, shuffled


def make_batch(lengths: list[int], prompt: int = 4) -> DataProto:
    width = max(lengths)
    response = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).long()
    attention = torch.cat([torch.ones(len(lengths), prompt, dtype=torch.long), response], dim=1)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.arange(attention.numel()).view_as(attention),
            "response_mask": response,
            "attention_mask": attention,
            "row": torch.arange(len(lengths)),
        },
        non_tensors={"uid": np.array([f"u{i}" for i in range(len(lengths))], dtype=object)},
    )


def test_seeds_depend_on_run_stream_and_step_and_on_nothing_else():
    seeds = sampling_seeds(3, 0, 7, 64)
    assert seeds.dtype == torch.int64 and seeds.unique().numel() == 64
    assert torch.equal(seeds, sampling_seeds(3, 0, 7, 64))
    assert torch.equal(seeds[:10], sampling_seeds(3, 0, 7, 10))
    others = [sampling_seeds(4, 0, 7, 64), sampling_seeds(3, 1, 7, 64), sampling_seeds(3, 0, 8, 64)]
    for other in [*others, sampling_seeds(3, 0, 7, 64, round_=1)]:
        assert not torch.isin(seeds, other).any()


def test_rule_7_a_group_is_one_prompt_of_one_step_whatever_its_dataset_index_says():
    rows = [
        {"raw_prompt_ids": [1], "extra_info": {"index": 0}},
        {"raw_prompt_ids": [1], "extra_info": {"index": 0}},
    ]
    first = prompt_batch(rows, "step1")
    second = prompt_batch(rows, "step2")
    groups = first.repeat(3, interleave=True).non_tensor_batch["uid"]
    assert list(groups) == ["step1-0"] * 3 + ["step1-1"] * 3
    assert not set(groups) & set(second.non_tensor_batch["uid"])


@pytest.mark.parametrize(
    "num_rows, size, steps",
    [(16, 8, 2), (15, 8, 2), (17, 8, 2), (31, 8, 2), (8, 8, 1), (9, 8, 2), (20, 16, 1), (3, 8, 1)],
)
def test_rows_that_joined_a_step_of_16_bring_no_optimizer_step_of_their_own(num_rows, size, steps):
    mini_batch = f"actor_rollout_ref.actor.ppo_mini_batch_size={size}"
    config = config_with("data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=4", mini_batch)
    assert num_mini_batches(config, num_rows, config.actor_rollout_ref.actor) == steps


@given(num_rows=st.integers(1, 300), size=st.integers(1, 64))
def test_mini_batches_are_as_many_as_their_size_asks_for_and_differ_by_a_row_at_most(num_rows, size):
    count = -(-num_rows // size)
    parts = mini_batches(num_rows, count)
    assert len(parts) == count and [row for part in parts for row in part] == list(range(num_rows))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
    if num_rows % size == 0:
        assert sizes == [size] * count


@settings(max_examples=25, deadline=None)
@given(num_rows=st.integers(1, 30), count=st.integers(1, 9), world_size=st.integers(2, 4))
def test_every_rank_finds_its_share_of_each_mini_batch_in_its_own_rows(num_rows, count, world_size):
    count = min(count, num_rows)
    batch = make_batch([3 + row % 5 for row in range(num_rows)])
    arranged, _ = arrange_for_workers(batch, world_size, count)
    members: list[list[int]] = [[] for _ in range(count)]
    for rank in arranged.chunk(world_size):
        is_real = rank.batch["response_mask"].any(dim=1)
        for number, part in enumerate(mini_batches(len(rank), count)):
            assert len(part) == -(-len(mini_batches(num_rows, count)[number]) // world_size)
            members[number] += [int(rank.batch["row"][row]) for row in part if is_real[row]]
    assert [sorted(rows) for rows in members] == [list(part) for part in mini_batches(num_rows, count)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [7, 8, 24])
def test_each_mini_batch_is_the_same_set_of_rows_for_any_number_of_ranks(world_size, num_rows):
    generator = np.random.default_rng(num_rows)
    batch = make_batch(generator.integers(1, 500, num_rows).tolist())
    parts = mini_batches(num_rows, -(-num_rows // 4))
    arranged, tokens = arrange_for_workers(batch, world_size, len(parts))
    assert len(arranged) % world_size == 0
    ranks = arranged.chunk(world_size)
    taken = [0] * world_size
    for expected in parts:
        share = -(-len(expected) // world_size)
        members: list[int] = []
        for rank, part in enumerate(ranks):
            piece = part[taken[rank] : taken[rank] + share]
            taken[rank] += share
            live = piece.batch["response_mask"].sum(-1) > 0
            members += piece.batch["row"][live].tolist()
        assert sorted(members) == sorted(expected)
    assert sum(tokens) >= int(batch.batch["attention_mask"].sum())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rule_5_shuffled_mini_batches_are_the_same_sets_for_any_number_of_ranks(world_size):
    batch = make_batch([3, 9, 27, 81, 5, 25, 125, 2, 4, 8])
    order = shuffled(len(batch), seed=1, training_step=4, epoch=0)
    arranged, _ = arrange_for_workers(batch.select_idxs(order), world_size, 3)
    ranks = arranged.chunk(world_size)
    parts = [list(map(list, mini_batches(len(rank), 3))) for rank in ranks]
    for k, places in enumerate([range(4), range(4, 7), range(7, 10)]):
        members = [
            row
            for rank, rows in zip(ranks, parts, strict=True)
            for row, mask in zip(
                rank.batch["row"][rows[k]].tolist(), rank.batch["response_mask"][rows[k]], strict=True
            )
            if mask.any()
        ]
        assert sorted(members) == sorted(order[place] for place in places)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_tokens_of_each_rank_are_those_of_its_rows(world_size):
    batch = make_batch([3, 9, 27, 81, 5, 25, 125, 2, 4, 8])
    arranged, tokens = arrange_for_workers(batch, world_size, 3)
    ranks = arranged.chunk(world_size)
    assert tokens == [int(rank.batch["attention_mask"].sum()) for rank in ranks]


def test_attention_costs_as_much_as_the_layers_matrices_at_the_length_that_is_told():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 24}
    config = Qwen3Config(**sizes, num_attention_heads=6, num_key_value_heads=2, vocab_size=10)
    (layer,) = Qwen3ForCausalLM(config).model.layers
    num_weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    assert attention_length(config) == num_weights / (6 * 24)


def rows(*specifications):
    """(token, length) -> a sequence of that token: equal tokens begin alike."""
    return [np.full(length, token) for token, length in specifications]


def test_trajectories_of_a_prompt_stay_together_where_that_saves_more_than_it_unbalances():
    sequences = rows((7, 90), (8, 90), (7, 91), (8, 91), (7, 92), (8, 92))
    parts = balanced_parts(sequences, 2, 1e9)
    assert sorted(parts) == [[0, 2, 4], [1, 3, 5]]


def test_observations_are_what_was_neither_sampled_nor_padding_also_after_a_rejection():
    batch = batch_of("ab", [4, 2], masks=[[1, 0, 0, 1], [1, 1, 0, 0]])
    actor = "actor_rollout_ref.actor"
    config = config_with(
        f"{actor}.echo_coeff=0.1", f"{actor}.shuffle=false", f"{actor}.ppo_mini_batch_size=2"
    )
    trainer = SimpleNamespace(config=config, passes=Passes(config))
    for _ in range(2):
        rows, _ = RayPPOTrainer._arranged(
            trainer, batch, SimpleNamespace(dp_size=1), config.actor_rollout_ref.actor
        )
        assert rows.tensors["observation_mask"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
        batch.tensors["sampled_mask"] = batch.tensors["response_mask"]
        batch.tensors["response_mask"] = torch.zeros(2, 4, dtype=torch.long)
