"""Losses that look beyond a row, in two processes under FSDP2 against one plain process."""

import algorithm_ranks
import pytest
import torch
from ranks import run_ranks
from tiny_training import assert_same_gradients

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory, model_path):
    """What each of two ranks found."""
    out = tmp_path_factory.mktemp("two_ranks_of_algorithms")
    run_ranks(algorithm_ranks.rank_main, 2, model_path, out)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(model_path):
    return algorithm_ranks.updates(model_path)


@pytest.mark.parametrize("case", algorithm_ranks.CASES)
def test_rule_5_two_processes_have_the_loss_and_gradient_of_one(two, one, case):
    metrics, gradient = one[case]
    for results in two:
        rank_metrics, rank_gradient = results["updates"][case]
        assert rank_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        assert_same_gradients(rank_gradient, gradient)
    if case == "no advantage at all":
        assert all((g == 0).all() for g in gradient.values())


def test_all_ranks_skip_an_update_that_is_not_finite_on_one_and_say_why(two):
    first, second = (results["spoilt"] for results in two)
    assert first == second
    (num_skipped, token), (num_skipped_too, gradient) = first
    assert num_skipped == num_skipped_too == 1
    assert token.startswith("advantages nan at place 0 of the response of row 1 of rank 1 (step1-")
    assert gradient.startswith("only the gradient is not finite, that of row ")
    assert " or row " in gradient and "row 1 of rank 1 (step1-" in gradient  # one row of each rank


def test_passes_without_a_gradient_see_the_weights_of_the_step_before(two, model_path):
    expected = algorithm_ranks.two_steps(model_path)
    for results in two:
        for name, tensor in results["two steps"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-4)


def test_a_bound_on_the_step_shortens_it_alike_on_two_processes_and_on_one(two, model_path):
    expected = algorithm_ranks.bounded_steps(model_path)
    for results in two:
        for (metrics, weights), (one_metrics, one_weights) in zip(results["bounded"], expected, strict=True):
            assert 0 < metrics["actor/step_share"] < 1 and metrics["actor/step_kl"] > 0.01
            names = "actor/step_share", "actor/step_kl"
            assert [metrics[name] for name in names] == pytest.approx(
                [one_metrics[name] for name in names], rel=1e-3
            )
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, one_weights[name], rtol=1e-3, atol=2e-4)
