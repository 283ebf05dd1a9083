"""The entropy bonus and its weight, against float64 loops."""

import json
import math

import pytest
import slow_corrections as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

some_examples = settings(deadline=None, derandomize=True, max_examples=25)


@pytest.mark.parametrize("mode", slow.AGGREGATIONS)
@some_examples
@given(batch=ragged_batches())
def test_the_bonus_is_the_mean_entropy_of_the_sampled_tokens_and_sees_nothing_else(mode, batch):
    entropy, mask = batch.rand("entropy").double(), batch.response_mask
    runs = []
    for values in (entropy, batch.with_garbage(entropy)):
        values = values.clone().requires_grad_()
        bonus = algos.compute_entropy_loss(values, mask, mode)
        runs.append((bonus.detach(), torch.autograd.grad(bonus, values)[0]))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0].item() == pytest.approx(slow.AGGREGATIONS[mode](entropy.tolist(), mask.tolist()))
    weights = [
        [slow.token_weight(mode, mask.tolist(), i) if k else 0.0 for k in row]
        for i, row in enumerate(mask.tolist())
    ]
    torch.testing.assert_close(runs[0][1], torch.tensor(weights).double())


def adaptive(coeff=0.01, target=0.2, delta=0.004, low=0.0, high=0.03):
    control = {"type": "adaptive", "target_entropy": target, "delta": delta}
    control |= {"min_coeff": low, "max_coeff": high}
    return algos.get_entropy_controller({"entropy_coeff": coeff, "entropy_ctrl": control})


entropies = st.one_of(st.floats(0, 1), st.sampled_from([0.2, math.nan, math.inf]))


@some_examples
@given(measured=st.lists(entropies, max_size=30), low=st.sampled_from([0.0, 0.002]), stop=st.integers(0, 30))
def test_the_adaptive_weight_follows_its_formula_and_survives_a_restart(measured, low, stop):
    controller, weights = adaptive(low=low), []
    for number, entropy in enumerate(measured):
        if number == stop:
            saved = json.loads(json.dumps(controller.state_dict()))
            controller = adaptive(low=low)
            controller.load_state_dict(saved)
        weights.append(controller.value)
        controller.update(entropy)
    assert weights == pytest.approx(slow.entropy_weights(0.01, 0.2, 0.004, low, 0.03, measured))


def test_the_bonus_grows_while_the_entropy_is_low_and_is_off_above_the_target():
    controller = adaptive()
    for _ in range(3):
        controller.update(0.05)
    assert controller.value == pytest.approx(0.01 + 3 * 0.004)
    for _ in range(10):
        controller.update(0.05)
    assert controller.value == 0.03  # its upper limit
    controller.update(0.3)
    assert controller.value == 0.0
    controller.update(0.19)
    assert controller.value == 0.03  # 0.03 - 0.004 + 0.004


def test_a_policy_that_loses_its_entropy_is_held_near_the_target():
    """A made-up policy whose entropy sinks by 0.01 a step and rises with the bonus."""
    controller, entropy, seen = adaptive(coeff=0.0, delta=0.001), 0.8, []
    for _ in range(400):
        entropy = max(entropy - 0.01 + controller.value, 0.0)
        controller.update(entropy)
        seen.append(entropy)
    assert min(seen[200:]) > 0.1 and max(seen[200:]) < 0.3


def test_limits_that_changed_since_the_checkpoint_are_kept_to():
    controller = adaptive(high=0.03)
    for _ in range(9):
        controller.update(0.0)
    lower = adaptive(high=0.02)
    lower.load_state_dict(controller.state_dict())
    assert lower.value == 0.02


def test_a_fixed_weight_stays_whatever_is_measured_and_restored():
    config = {"entropy_coeff": 0.003, "entropy_ctrl": {"type": "fixed"}}
    controller = algos.get_entropy_controller(config)
    controller.update(0.0)
    controller.load_state_dict(adaptive().state_dict())
    assert controller.value == 0.003


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="needs entropy_ctrl.target_entropy"):
        adaptive(target=None)
    with pytest.raises(ValueError, match="entropy_coeff=0.5.*max_coeff=0.03"):
        adaptive(coeff=0.5)
    with pytest.raises(ValueError, match="found 'cosine'"):
        algos.get_entropy_controller({"entropy_coeff": 0.0, "entropy_ctrl": {"type": "cosine"}})
