"""Advantages with known answers: the papers' examples, and the gradients that the estimators promise."""

import itertools
import math

import pytest
import torch
from advantage_cases import advantages_of, assert_close

from verl.algos.advantages import Groups
from verl.algos.group_estimators import thrift_advantages
from verl.trainer.ppo import core_algos as algos


def of_scores(name, scores, uids=None, **inputs):
    """[N] advantages of rows with one token each."""
    rewards = torch.tensor(scores).unsqueeze(-1)
    advantages, _ = advantages_of(
        name, rewards, torch.ones_like(rewards), index=uids or ["a"] * len(scores), **inputs
    )
    return advantages.flatten()


@pytest.mark.parametrize(
    ("name", "by_std", "wanted"),
    [
        ("grpo", True, [1.5, -0.5, -0.5, -0.5]),
        ("grpo", False, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", True, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo_passk", True, [2.0, 0.0, 0.0, 0.0]),
        ("grpo_passk", False, [1.0, 0.0, 0.0, 0.0]),
        ("maxrl", True, [3.0, -1.0, -1.0, -1.0]),
        ("gpg", True, [0.75, -0.25, -0.25, -0.25]),
        ("opo", True, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_right_answer_out_of_four(name, by_std, wanted):
    got = of_scores(name, [1.0, 0.0, 0.0, 0.0], norm_adv_by_std_in_grpo=by_std)
    assert_close(got, torch.tensor(wanted), 1e-5)


def test_opo_weighs_the_baseline_by_the_number_of_sampled_tokens():
    rewards = torch.zeros(2, 5)
    rewards[0, 0] = 1.0
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 0, 1, 1, 0]])
    advantages, _ = algos.compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    assert_close(advantages, torch.tensor([[0.75, 0, 0, 0, 0], [-0.25, 0, -0.25, -0.25, 0]]), 1e-6)


@pytest.mark.parametrize("other_score", [0.0, 1.0])
def test_gpg_makes_up_for_groups_that_are_all_right_or_all_wrong(other_score):
    got = of_scores("gpg", [1.0, 0.0, other_score, other_score], ["a", "a", "b", "b"])
    assert got.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_gdpo_keeps_apart_what_grpo_makes_equal():
    """Figure 2 of arXiv:2601.05242: two binary rewards, two rows; one row has one reward more, or two."""
    uids = ["one", "one", "two", "two"]
    components = {"a": torch.tensor([0.0, 0.0, 0.0, 1.0]), "b": torch.tensor([0.0, 1.0, 0.0, 1.0])}
    together = of_scores("grpo", (components["a"] + components["b"]).tolist(), uids)
    half = math.sqrt(0.5)
    assert_close(together, torch.tensor([-half, half, -half, half]), 1e-5)
    apart = of_scores("gdpo", [0.0] * 4, uids, reward_components=components)
    assert_close(apart * 2 * half / apart[3], torch.tensor([-half, half, -2 * half, 2 * half]), 1e-5)
    assert_close(apart.std(), torch.tensor(1.0), 1e-5)
    weighted = of_scores(
        "gdpo", [0.0] * 4, uids, reward_components=components, reward_weights={"a": 0.0, "b": 5.0}
    )
    assert_close(weighted, torch.tensor([-1.0, 1.0, -1.0, 1.0]) * math.sqrt(0.75), 1e-5)


def test_remax_takes_the_greedy_answers_score_off_each_reward_to_go():
    rewards = torch.tensor([[0.5, 9.0, 1.0]])
    mask = torch.tensor([[1, 0, 1]])
    advantages, returns = algos.compute_remax_outcome_advantage(rewards, torch.tensor([1.0]), mask)
    assert advantages.tolist() == [[0.5, 0.0, 0.0]] and returns.tolist() == [[1.5, 0.0, 1.0]]


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    advantages, _ = algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, ["a", "a"])
    # differences 0.5 on one token and -0.5 on three: mean -0.25, unbiased variance 0.25
    assert_close(advantages, torch.tensor([[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]), 1e-5)


@pytest.mark.parametrize(
    ("solved", "searches", "wanted"),
    [
        ([1, 1, 1, 1], [1, 2, 2, 2], [1.5, 0, 0, 0]),
        ([1, 1, 1, 1, 0, 0], [1, 2, 2, 2, 0, 3], [1.5, 0, 0, 0, 0, 0]),  # wrong ones are not compared
        ([1, 1, 0, 0], [3, 1, 0, 0], [0, 0.5**0.5, 0, 0]),
        ([1, 1, 1, 0], [2, 2, 2, 1], [0, 0, 0, 0]),
        ([1, 0, 0, 0], [1, 2, 2, 2], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]),
        ([1, 1, 1, None], [1, 2, 2, 0], [2 / 3 / (1 / 3) ** 0.5, 0, 0, 0]),  # left out of the batch
    ],
)
def test_thrift_is_a_shorter_way_than_the_others_of_a_group_took_to_a_right_answer(solved, searches, wanted):
    is_counted = torch.tensor([is_solved is not None for is_solved in solved])
    right = torch.tensor([is_solved is None or bool(is_solved) for is_solved in solved])
    groups = Groups.of(["a"] * len(solved), is_counted)
    thrift = thrift_advantages(right, torch.tensor(searches), groups, 1.0)
    assert thrift.tolist() == pytest.approx(wanted, abs=1e-5)


def test_thrift_compares_rows_of_one_group_and_no_others():
    groups = Groups.of("abab", torch.ones(4, dtype=torch.bool))
    thrift = thrift_advantages(torch.ones(4, dtype=torch.bool), torch.tensor([1, 5, 2, 5]), groups, 1.0)
    assert thrift.tolist() == pytest.approx([0.5**0.5, 0, 0, 0], abs=1e-5)


def test_thrift_hardly_counts_as_long_as_few_questions_are_answered():
    groups = Groups.of("aaaabbbbcccc", torch.ones(12, dtype=torch.bool))
    searches = torch.tensor([1, 2, 2, 2] * 3)
    solved = torch.tensor([True] * 4 + [False] * 8)
    one_in_three = thrift_advantages(solved, searches, groups, 1 / 3)
    assert one_in_three.tolist() == pytest.approx([1.5 / 9] + [0.0] * 11, abs=1e-5)


def coin_flip_gradient(name, num_rows, p):
    """Sum over all outcomes of P(outcome) * sum_i A_i d log P(score_i) / dp, p the chance of a score of 1."""
    total = 0.0
    for scores in itertools.product([0.0, 1.0], repeat=num_rows):
        chance = math.prod(p if score else 1 - p for score in scores)
        slopes = [1 / p if score else -1 / (1 - p) for score in scores]
        advantages = of_scores(name, list(scores), norm_adv_by_std_in_grpo=False).double().tolist()
        total += chance * math.fsum(a * slope for a, slope in zip(advantages, slopes, strict=True))
    return total


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_expected_gradient_is_that_of_what_the_estimator_is_for(num_rows, p):
    """Of the mean score (rloo), of a right one among all rows (pass@k), of log p to n - 1 terms (MaxRL)."""

    def gradient(name):
        return coin_flip_gradient(name, num_rows, p)

    assert gradient("rloo") / num_rows == pytest.approx(1.0, abs=1e-6)
    biased = (num_rows - 1) / num_rows if num_rows > 1 else 1.0  # the row itself is in its baseline
    assert gradient("grpo") / num_rows == pytest.approx(biased, abs=1e-6)
    assert gradient("opo") / num_rows == pytest.approx(biased, abs=1e-6)
    assert gradient("grpo_passk") == pytest.approx(num_rows * (1 - p) ** (num_rows - 1), abs=1e-6)
    log_p = math.fsum((1 - p) ** k for k in range(max(num_rows - 1, 1)))  # d/dp of -sum (1 - p)^k / k
    assert gradient("maxrl") / num_rows == pytest.approx(log_p, abs=1e-6)


def test_the_energy_of_the_optimal_token_baseline_is_the_squared_gradient_by_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(7, (2, 5, 1), generator=generator)
    log_probs = logits.log_softmax(-1)
    (slopes,) = torch.autograd.grad(log_probs.gather(-1, tokens).sum(), logits)
    energy = slopes.square().sum(-1).cumsum(-1)
    scores = torch.tensor([1.0, 0.0])
    rewards = torch.zeros(2, 5)
    rewards[:, -1] = scores
    advantages, returns = algos.compute_optimal_token_baseline_advantage(
        rewards,
        torch.ones(2, 5),
        ["a", "a"],
        log_probs.gather(-1, tokens).squeeze(-1).detach(),
        log_probs.detach().exp().square().sum(-1),
    )
    baseline = returns.double() - advantages.double()
    assert_close(baseline, (energy[0] / energy.sum(0)).expand(2, 5))
    for moved in (baseline + 1e-3, baseline - 1e-3):  # no other baseline gives the gradient less variance

        def variance(at):
            return (energy * (returns.double() - at).square()).sum(0)

        assert (variance(moved) > variance(baseline)).all()
