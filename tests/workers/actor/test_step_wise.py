"""Turns as rows through the real actor: whole trajectories' gradient, and no more tokens than theirs."""

import pytest
import step_wise_cases as cases
import torch
from algorithm_cases import ALL_ROWS, SPLITS, ActorFactory
from ranks import run_ranks
from tiny_training import assert_same_gradients, gradients_of

from verl.workers.engine.update_loop import MicroBatchLimits

PASSES = {
    "one pass": ALL_ROWS,
    "2 trajectories": MicroBatchLimits(2, None, padded=False),
    "40 tokens": MicroBatchLimits(None, 40, padded=False),  # fewer than the longest trajectory has
    "padded": SPLITS["rows of 3, padded"],
}


@pytest.fixture(scope="module")
def factory(model_path):
    """In float64: float32 alone rounds padded passes of other widths to some 1e-6."""
    made = ActorFactory(model_path)
    made.engine.module.double()
    return made


@pytest.mark.parametrize("limits", PASSES)
@pytest.mark.parametrize("case", cases.EQUAL)
def test_the_gradient_and_the_metrics_are_those_of_whole_trajectories(factory, case, limits):
    batch = cases.trajectories()
    settings = cases.EQUAL[case]
    metrics, gradient = factory.update(batch, PASSES[limits], **settings)
    expected_metrics, expected = factory.update(cases.whole(batch), PASSES[limits], **settings)
    assert_same_gradients(gradient, expected, tolerance=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)
    assert sum(want.abs().sum() for want in expected.values()) > 0


@pytest.mark.parametrize("case", cases.BY_TURN)
def test_a_turn_is_a_sequence_to_what_knows_sequences(factory, case):
    batch = cases.trajectories()
    settings = cases.BY_TURN[case] | {"entropy_coeff": 0.0}
    _, gradient = factory.update(batch, PASSES["2 trajectories"], **settings)
    _, expected = factory.update(cases.turns_as_trajectories(batch), SPLITS["rows of 3, padded"], **settings)
    assert_same_gradients(gradient, expected, tolerance=2e-6)
    _, other = factory.update(cases.whole(batch), **settings)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradient, other, tolerance=1e-2)


def test_seq_mean_of_sums_is_the_whole_trajectory_s_gradient_but_for_the_count(factory):
    batch = cases.trajectories()
    settings = {"loss_agg_mode": "seq-mean-token-sum", "entropy_coeff": 0.0}
    _, gradient = factory.update(batch, **settings)
    _, expected = factory.update(cases.whole(batch), **settings)
    mask = batch.tensors["response_mask"].bool()
    turns = batch.tensors["turn_ids"]
    num_turns = sum(len(set(row[own].tolist())) for row, own in zip(turns, mask, strict=True))
    share = int(mask.any(dim=1).sum()) / num_turns
    assert_same_gradients(gradient, {name: share * want for name, want in expected.items()}, tolerance=1e-6)


@pytest.mark.parametrize("limits", ["one pass", "2 trajectories", "40 tokens"])
def test_the_model_computes_each_token_of_a_trajectory_once(factory, limits, monkeypatch):
    seen = []
    forward = factory.engine._forward

    def counted(micro_batch, options):
        seen.append((micro_batch.input_ids.shape[1], micro_batch.packing.seq_lens, len(micro_batch.labels)))
        return forward(micro_batch, options)

    monkeypatch.setattr(factory.engine, "_forward", counted)
    # else what is behind the last turn is left out
    batch = cases.trajectories()
    echo = {"echo_coeff": 0.3}
    factory.update(batch, PASSES[limits], **echo)
    turns = seen[:]
    seen[:] = []
    factory.update(cases.whole(batch), PASSES[limits], **echo)
    assert turns == seen and seen


@pytest.mark.parametrize("epochs", [1, 2])
def test_mini_batches_are_of_trajectories_and_as_many(factory, epochs):
    batch = cases.trajectories()
    batch.meta_info["num_mini_batches"] = 4

    def gradients(data):
        factory.engine.scheduler.last_epoch = 0
        actor = factory.actor(PASSES["40 tokens"], ppo_epochs=epochs, shuffle=True)
        assert actor.loop.num_steps(data) == 4 * epochs
        return gradients_of(factory.engine, lambda: actor.update_policy(data))[1]

    of_turns = gradients(batch)
    of_trajectories = gradients(cases.whole(batch))
    assert len(of_turns) == len(of_trajectories) == 4 * epochs
    for gradient, expected in zip(of_turns, of_trajectories, strict=True):
        assert_same_gradients(gradient, expected, tolerance=1e-6)


def test_the_agreement_with_the_engine_is_measured_over_trajectories(factory):
    batch = cases.trajectories()
    batch.tensors["rollout_log_probs"] = batch.tensors["old_log_probs"] - 0.1
    agreement = [
        {name: value for name, value in metrics.items() if name.startswith("rollout_corr/")}
        for metrics, _ in (factory.update(batch), factory.update(cases.whole(batch)))
    ]
    assert agreement[0] and agreement[0] == pytest.approx(agreement[1], rel=1e-5)


def test_a_number_that_is_not_finite_is_named_by_its_trajectory(factory):
    batch = cases.trajectories()
    second = (batch.tensors["turn_ids"][1] == 1).nonzero()[0]
    batch.tensors["advantages"][1, second] = torch.nan
    actor = factory.actor()
    assert actor.update_policy(batch)["actor/num_skipped_updates"] == 1
    assert "(step1-0)" in actor.loop.skipped_update


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path, model_path):
    run_ranks(cases.rank_main, 2, model_path, tmp_path)
    one = cases.updates(model_path, 0, 1)
    for rank in range(2):
        turns, trajectories = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        for case, (metrics, gradient) in turns.items():
            expected_metrics, expected = one[case]
            assert_same_gradients(gradient, expected)
            assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)
            if case in cases.EQUAL:
                assert_same_gradients(gradient, trajectories[case][1], tolerance=1e-6)
