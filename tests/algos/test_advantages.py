"""Every advantage estimator against its slow float64 twin, and the rules that hold for all of them, over
random ragged multi-turn batches.
"""

import copy

import pytest
import torch
from advantage_cases import NAMES, advantages_of, arguments, assert_close, compute, dirty, expected, reordered
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

WHOLE_BATCH = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo"}
ROW_WISE = {"grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "gdpo"}
thorough = settings(deadline=None, derandomize=True, max_examples=15)
quick = settings(deadline=None, derandomize=True, max_examples=5)


@pytest.mark.parametrize("name", NAMES)
@thorough
@given(batch=ragged_batches(), by_std=st.booleans())
def test_advantages_and_returns_equal_float64_loops_written_from_the_formula(name, batch, by_std):
    given_arguments = arguments(batch, name, by_std)
    before = copy.deepcopy(given_arguments)
    advantages, returns = compute(name, given_arguments)
    wanted_advantages, wanted_returns = expected(name, given_arguments)
    assert_close(advantages, wanted_advantages)
    assert_close(returns, wanted_returns)
    assert advantages.dtype == returns.dtype == torch.float32
    nothing_sampled = batch.response_mask == 0
    assert not advantages[nothing_sampled].any() and not returns[nothing_sampled].any()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(given_arguments[key], value), f"{key} was changed"


@pytest.mark.parametrize("name", NAMES)
@quick
@given(batch=ragged_batches(), value=st.sampled_from([float("nan"), float("inf"), -3e38, 7.0]))
def test_rule_3_whatever_stands_where_nothing_was_sampled_changes_no_bit(name, batch, value):
    clean = compute(name, arguments(batch, name))
    spoiled = compute(name, dirty(arguments(batch, name), value))
    for got, wanted in zip(spoiled, clean, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(batch=ragged_batches(), random=st.randoms(use_true_random=False))
def test_rule_7_the_order_of_rows_and_the_names_of_groups_do_not_matter(name, batch, random):
    order = random.sample(range(batch.num_rows), batch.num_rows)
    inputs = arguments(batch, name)
    straight = compute(name, inputs)
    shuffled = compute(name, reordered(inputs, order))
    renamed = compute(name, inputs | {"index": [f"other/{uid}" for uid in batch.uids]})
    for got, other, wanted in zip(shuffled, renamed, straight, strict=True):
        assert_close(got, wanted[order], 1e-6)
        assert torch.equal(other, wanted)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE_BATCH])
@quick
@given(batch=ragged_batches(max_rows=7))
def test_rule_7_a_group_alone_has_the_advantages_that_it_has_beside_others(name, batch):
    inputs = arguments(batch, name)
    advantages, returns = compute(name, inputs)
    for uid in set(batch.uids):
        rows = [i for i, other in enumerate(batch.uids) if other == uid]
        alone = compute(name, reordered(inputs, rows))
        assert torch.equal(alone[0], advantages[rows]) and torch.equal(alone[1], returns[rows])


@pytest.mark.parametrize("name", NAMES)
@quick
@given(batch=ragged_batches(max_rows=6), empty_rows=st.integers(1, 3))
def test_rows_without_a_sampled_token_count_nowhere(name, batch, empty_rows):
    more = [*range(batch.num_rows), *[0] * empty_rows]
    inputs = reordered(arguments(batch, name), more)
    inputs["response_mask"] = inputs["response_mask"].clone()
    inputs["response_mask"][batch.num_rows :] = 0
    padded = compute(name, inputs)
    bare = compute(name, arguments(batch, name))
    for got, wanted in zip(padded, bare, strict=True):
        assert_close(got[: batch.num_rows], wanted, 1e-7)
        assert not got[batch.num_rows :].any()


@pytest.mark.parametrize("name", sorted(ROW_WISE))
@pytest.mark.parametrize("score", [0.7, 1 / 3, 0.0, 1e-3, 1e6])
def test_equal_scores_give_advantages_of_exactly_zero_beside_a_group_that_learns(name, score):
    mask = torch.ones(12, 3, dtype=torch.int64)
    mask[4, 1:] = 0
    rewards = torch.zeros(12, 3)
    rewards[:7, 0] = score
    rewards[7:, 0] = torch.tensor([1.0, 0.13, 0.59, 0.0, 0.27])
    components = {"em": rewards[:, 0], "format": rewards[:, 0] / 3}
    advantages, _ = advantages_of(
        name, rewards, mask, index=["same"] * 7 + ["mixed"] * 5, reward_components=components
    )
    assert torch.equal(advantages[:7], torch.zeros(7, 3))
    assert advantages[7].min() > 0 and advantages.isfinite().all()


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl"])
def test_a_row_that_is_alone_in_its_group_keeps_its_score(name):
    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0]])
    mask = torch.tensor([[0, 1], [1, 1], [1, 1]])
    advantages, _ = advantages_of(name, rewards, mask, index=["a", "b", "c"])
    assert_close(advantages, torch.tensor([[0.0, 3.0], [1.0, 1.0], [2.0, 2.0]]))


def test_gae_is_the_same_with_and_without_an_observation_in_the_middle():
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 2, 6, generator=generator)
    short = algos.compute_gae_advantage_return(rewards, values, torch.ones(2, 6), 0.9, 0.8)

    def widen(x, fill):
        return torch.cat([x[:, :3], torch.full((2, 4), fill), x[:, 3:]], dim=1)

    wide_mask = widen(torch.ones(2, 6), 0.0)
    wide = algos.compute_gae_advantage_return(widen(rewards, 5.0), widen(values, -7.0), wide_mask, 0.9, 0.8)
    for got, wanted in zip(wide, short, strict=True):
        assert torch.equal(got[wide_mask.bool()].view(2, 6), wanted)


def own_estimator(token_level_rewards, config, scale=2.0):
    advantages = config["gain"] * scale * token_level_rewards
    return advantages, advantages


def test_an_own_estimator_by_import_path_gets_what_it_names():
    rewards = torch.ones(1, 2)
    advantages, _ = advantages_of(
        f"{__name__}:own_estimator", rewards, torch.ones(1, 2), index=["a"], config={"gain": 3.0}
    )
    assert torch.equal(advantages, 6 * rewards)


def test_what_an_estimator_lacks_is_said_by_name():
    rewards = torch.zeros(2, 3)
    mask = torch.ones(2, 3)
    with pytest.raises(ValueError, match="'ppo', expected one of .*gae"):
        algos.get_adv_estimator_fn("ppo")
    for name, lacks in (("gae", "values"), ("remax", "reward_baselines"), ("gdpo", "reward_components")):
        with pytest.raises(ValueError, match=f"{name!r} needs {lacks}"):
            advantages_of(name, rewards, mask, index=["a", "a"])
    with pytest.raises(ValueError, match=r"found \['em'\], with weights for \['format'\]"):
        algos.compute_gdpo_outcome_advantage(
            rewards,
            mask,
            ["a", "a"],
            reward_components={"em": torch.zeros(2)},
            reward_weights={"format": 1.0},
        )
    with pytest.raises(ValueError, match="scores of 0 or more, found -1"):
        algos.compute_maxrl_outcome_advantage(rewards - 1 / 3, mask, ["a", "a"])
