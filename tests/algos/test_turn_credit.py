"""Credit for turns: what a turn's reward does to the advantages of its tokens, with every estimator."""

import pytest
import torch
from advantage_cases import NAMES, SLOW, advantages_of, arguments, assert_close, compute, reordered
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches
from slow_advantages import Rows, turns

from verl.trainer.ppo import core_algos as algos

NAN = float("nan")
TOKEN_WISE = ("gae", "reinforce_plus_plus", "optimal_token_baseline", "tir_optimal_token_baseline")
some = settings(deadline=None, derandomize=True, max_examples=10)


def turn_arguments(batch, name, by_std=True, num_turns=5):
    """The estimator's arguments with turn rewards: 0 or 1, some NaN, also in turns that were not taken."""
    rewards = batch.rand("turn rewards", batch.num_rows, num_turns).round()
    rewards[batch.rand("without", batch.num_rows, num_turns) < 0.3] = NAN
    return arguments(batch, name, by_std) | {"turn_ids": batch.turn_ids, "turn_rewards": rewards}


@pytest.mark.parametrize("name", NAMES)
@some
@given(batch=ragged_batches(), by_std=st.booleans())
def test_turn_rewards_act_as_the_formula_says_with_every_estimator(name, batch, by_std):
    inputs = turn_arguments(batch, name, by_std)
    advantages, returns = compute(name, inputs | {"turn_credit": 0.4})
    rest = {key: x.tolist() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    rows = Rows(rest["token_level_rewards"], rest["response_mask"], batch.uids, rest)
    if name not in TOKEN_WISE:
        outcome_advantages, outcome_returns = compute(name, inputs)
        assert_close(advantages, outcome_advantages + 0.4 * torch.tensor(turns(rows)))
        assert torch.equal(returns, outcome_returns)
        return
    for i, steps in enumerate(rows.steps):
        last_of_turn = {rest["turn_ids"][i][t]: t for t in steps}
        for turn, t in last_of_turn.items():
            reward = rest["turn_rewards"][i][turn]
            rows.rewards[i][t] += 0.0 if reward != reward else 0.4 * reward
    wanted_advantages, wanted_returns = SLOW[name](rows)
    assert_close(advantages, torch.tensor(wanted_advantages))
    assert_close(returns, torch.tensor(wanted_returns))


@pytest.mark.parametrize("name", ["grpo", "gae"])
@some
@given(batch=ragged_batches())
def test_it_is_off_by_default_to_the_bit(name, batch):
    with_turns = compute(name, turn_arguments(batch, name))
    without = compute(name, arguments(batch, name))
    for got, wanted in zip(with_turns, without, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["grpo", "gae", "remax"])
@some
@given(batch=ragged_batches(), random=st.randoms(use_true_random=False))
def test_garbage_and_the_order_of_rows_do_not_matter(name, batch, random):
    inputs = turn_arguments(batch, name) | {"turn_credit": 0.4}
    straight = compute(name, inputs)
    order = random.sample(range(batch.num_rows), batch.num_rows)
    shuffled = compute(name, reordered(inputs, order))
    taken = torch.zeros(batch.num_rows, inputs["turn_rewards"].shape[1], dtype=torch.bool)
    for i, row in enumerate(batch.turn_ids.tolist()):
        taken[i, [turn for turn in row if turn >= 0]] = True
    spoiled = compute(
        name,
        inputs
        | {
            "turn_ids": batch.turn_ids.masked_fill(batch.response_mask == 0, 77),
            "turn_rewards": inputs["turn_rewards"].masked_fill(~taken, 1e30),
        },
    )
    for got, dirty, wanted in zip(shuffled, spoiled, straight, strict=True):
        assert_close(got, wanted[order], 1e-6)
        assert torch.equal(dirty, wanted)


def test_the_two_turns_of_mt_grpo():
    """Search, then answer: the search's tokens get A_outcome + weight * A_turn, the answer's A_outcome."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 0]])
    turn_ids = torch.tensor([[0, 0, -1, -1, 1, 1], [0, 0, 0, -1, 1, -1]])
    rewards = torch.zeros(2, 6)
    rewards[0, 5] = 1.0
    inputs = {"index": ["a", "a"], "norm_adv_by_std_in_grpo": False, "turn_ids": turn_ids}
    found_by_second = torch.tensor([[0.0, NAN], [1.0, NAN]])
    advantages, _ = advantages_of(
        "grpo", rewards, mask, turn_rewards=found_by_second, turn_credit=0.6, **inputs
    )
    by_hand = torch.tensor([[0.2, 0.2, 0, 0, 0.5, 0.5], [-0.2, -0.2, -0.2, 0, -0.5, 0]])
    assert_close(advantages, by_hand, 1e-6)


def test_a_search_is_credited_for_what_later_searches_find_and_not_compared_with_answers():
    mask = torch.ones(3, 3)
    turn_ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 1]])
    # the first row's second search finds it, the second row's none; the third row answers in its second turn
    found = torch.tensor([[0.0, 1.0, NAN], [0.0, 0.0, NAN], [0.0, NAN, NAN]])
    got = algos.turn_advantages(mask, turn_ids, found, ["a"] * 3, normalise=False)
    wanted = [[2 / 3, 0.5, 0.0], [-1 / 3, -0.5, 0.0], [-1 / 3, 0.0, 0.0]]
    assert_close(got, torch.tensor(wanted), 1e-6)
    apart = algos.turn_advantages(mask, turn_ids, found, ["a", "b", "c"])
    assert not apart.any()
