"""Figures of rollouts against plain enumeration."""

import itertools

import numpy as np
import pytest

from verl.records.figures import mean_with_interval, pass_at, summarize


def line(example, reward, task="one", truncated=False, **more):
    em = float(reward == 1.0)
    known = {"example_id": example, "reward": reward, "em": em, "f1": em, "task": task}
    return known | {"is_truncated": truncated, "searches": 1, "completion_len": 4, **more}


def test_pass_at_j_is_the_share_of_choices_with_a_solved_rollout():
    for num in range(1, 8):
        for solved in range(num + 1):
            outcomes = [True] * solved + [False] * (num - solved)
            for j in range(1, num + 1):
                choices = [any(each) for each in itertools.combinations(outcomes, j)]
                assert pass_at(num, solved, j) == pytest.approx(np.mean(choices), abs=1e-12)
    with pytest.raises(ValueError, match="pass@3 of 2 rollouts"):
        pass_at(2, 1, 3)


def test_a_summary_of_examples_some_of_whose_rollouts_nobody_could_verify():
    rewards = {0: [1.0, 0.0, 0.0], 1: [1.0, 1.0, None], 2: [None, None, None], 3: [0.5, 0.0, 0.0]}
    lines = [line(example, reward) for example, group in rewards.items() for reward in group]
    figures = summarize(lines, solved_at=1.0)
    assert (figures["num_examples"], figures["num_rollouts"], figures["num_unverified"]) == (4, 12, 4)
    assert figures["avg@3"][0] == pytest.approx(np.mean([1 / 3, 1.0, 0.5 / 3]))
    assert figures["pass@1"][0] == pytest.approx(np.mean([1 / 3, 1.0, 0.0]))
    assert figures["pass@2"][0] == pytest.approx(np.mean([2 / 3, 1.0, 0.0]))
    assert figures["pass@3"][0] == pytest.approx(np.mean([1.0, 0.0]))  # of example 1 two are known
    assert summarize(lines, solved_at=0.5)["pass@3"][0] == 1.0
    assert "by_task" not in figures


def test_tasks_have_figures_of_their_own():
    figures = summarize([line(0, 1.0, "a"), line(1, 0.0, "b", truncated=True)], solved_at=1.0)
    assert figures["by_task"]["a"]["avg@1"][0] == 1.0 and figures["by_task"]["b"]["avg@1"][0] == 0.0
    assert figures["num_truncated"] == figures["by_task"]["b"]["num_truncated"] == 1


def test_an_interval_holds_the_true_mean_in_19_of_20_samples():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        mean, low, high = mean_with_interval(rng.binomial(1, 0.3, 100))
        assert low <= mean <= high
        held += low <= 0.3 <= high
    assert 0.90 <= held / 200 <= 0.99


def test_nothing_known_has_no_figures_but_counts():
    figures = summarize([line(0, None)], solved_at=1.0)
    assert figures["num_unverified"] == 1 and "avg@1" not in figures and "pass@1" not in figures
    assert summarize([], 1.0)["num_rollouts"] == 0
