"""The bound on an optimizer step is held along the step's own direction."""

import math

import pytest
import torch
from tiny_training import make_actor, make_batch, make_config, reference_log_probs, save_hf

from verl.workers.actor.step_bound import MEASURED_SHARE, MIN_MEASURED_ROWS, measured_rows, shorter_by

BOUND = 0.02  # the actor's steps of these tests have a distance of more than 1


def trained(model_path, *overrides, num_rows=8):
    """(the actor after one step on a batch, its metrics, the batch)."""
    actor = make_actor(make_config(model_path, *overrides))
    batch = make_batch(num_rows)
    metrics = actor.update_policy(batch)
    return actor, metrics, batch


def weights_of(actor):
    return {name: weight.detach().double().clone() for name, weight in actor.engine.weights()}


def bound_of(value):
    return f"actor_rollout_ref.actor.max_step_kl={value}"


def test_a_step_within_the_bound_stays_as_it_is_bit_by_bit(model_path):
    free, free_metrics, _ = trained(model_path)
    bounded, metrics, _ = trained(model_path, bound_of(1e9))
    expected = weights_of(free)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(bounded).items())
    assert metrics["actor/step_share"] == 1.0 and metrics["actor/step_kl"] > 10 * BOUND
    shared = {name: value for name, value in metrics.items() if not name.startswith("actor/step_")}
    assert shared == free_metrics


@pytest.mark.parametrize("num_rows", [8, 150])  # all rows are measured; one in eight
def test_a_longer_step_goes_as_far_as_the_bound_in_its_own_direction(model_path, tmp_path, num_rows):
    size = f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}"
    start = weights_of(make_actor(make_config(model_path)))
    free = weights_of(trained(model_path, size, num_rows=num_rows)[0])
    actor, metrics, batch = trained(model_path, size, bound_of(BOUND), num_rows=num_rows)
    share = metrics["actor/step_share"]
    assert 0 < share < 0.5
    for name, weight in weights_of(actor).items():
        expected = start[name] + share * (free[name] - start[name])
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)

    save_hf(actor.engine, tmp_path / "after", None, model_path)
    rows = measured_rows(batch.batch["response_mask"], range(num_rows), 1)
    with torch.no_grad():
        before = reference_log_probs(model_path, batch)[1].double()
        after = reference_log_probs(tmp_path / "after", batch)[1].double()
    mask = batch.batch["response_mask"].bool()[rows]
    distance = float(((after - before)[rows][mask] ** 2).mean() / 2)
    assert BOUND / 4 < distance <= BOUND * (1 + 1e-3)


@pytest.mark.parametrize("spoilt", [math.nan, 30.0])
def test_a_step_that_can_not_be_brought_within_the_bound_is_undone(model_path, spoilt, monkeypatch):
    """The optimizer leaves numbers that no shortening mends, or the bound is below all that is tried."""
    actor = make_actor(make_config(model_path, bound_of(1e-12)))
    start = weights_of(actor)
    make_step = actor.engine.optimizer.step

    def step(*arguments):
        make_step(*arguments)
        with torch.no_grad():
            actor.engine.trained_weights()[0].fill_(spoilt)

    monkeypatch.setattr(actor.engine.optimizer, "step", step)
    metrics = actor.update_policy(make_batch())
    assert metrics["actor/step_share"] == 0.0
    assert all(torch.equal(weight, start[name]) for name, weight in weights_of(actor).items())


def test_each_optimizer_step_has_the_bound_for_itself(model_path):
    overrides = bound_of(BOUND), "actor_rollout_ref.actor.ppo_epochs=3"
    actor, metrics, _ = trained(model_path, *overrides, num_rows=16)
    assert actor.engine.weights_version == 6
    assert metrics["actor/step_kl"] > BOUND > 0 and 0 < metrics["actor/step_share"] < 1


def test_the_optimizer_averages_the_gradients_as_without_a_bound(model_path):
    free, bounded = (trained(model_path, *more)[0].engine for more in ((), (bound_of(BOUND),)))
    states = [engine.optimizer.state_dict()["state"] for engine in (free, bounded)]
    for number, state in states[0].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, states[1][number][name]), name


def test_rows_without_a_gradient_are_measured_too(model_path):
    batch = make_batch(16)
    batch.batch["advantages"][8:] = 0.0
    rows = measured_rows(batch.batch["response_mask"], range(16), 1)
    assert set(rows) == set(range(16)) - {3}  # the row that sampled nothing


def test_one_row_in_eight_is_measured_evenly_spaced_and_no_fewer_than_sixteen():
    mask = torch.ones(1000, 2)
    rows = measured_rows(mask, range(100, 900), 1)
    assert len(rows) == 800 // MEASURED_SHARE and set(torch.tensor(rows).diff().tolist()) == {MEASURED_SHARE}
    assert len(measured_rows(mask, range(40), 1)) == MIN_MEASURED_ROWS
    assert len(measured_rows(mask, range(40), 4)) == 5  # of each of four processes: an eighth, more than 4
    assert measured_rows(mask, range(3), 1) == [0, 1, 2]
    assert measured_rows(torch.zeros(4, 2), range(4), 1) == []


@pytest.mark.parametrize(
    ("distance", "factor"),
    [(0.04, 0.45), (0.02, 0.45 * math.sqrt(2)), (100.0, 0.1), (math.inf, 0.1), (math.nan, 0.1)],
)
def test_a_step_is_cut_by_the_square_root_of_how_much_too_far_it_goes(distance, factor):
    assert shorter_by(distance, 0.01) == pytest.approx(factor)
