"""The weight of the entropy bonus, against a float64 loop."""

import json
import math
from types import SimpleNamespace

import pytest
import slow_corrections as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo import core_algos as algos

some_examples = settings(deadline=None, derandomize=True, max_examples=25)


def adaptive(coeff=0.01, target=0.2, delta=0.004, low=0.0, high=0.03):
    control = SimpleNamespace(target_entropy=target, delta=delta, min_coeff=low, max_coeff=high)
    return algos.get_entropy_controller(SimpleNamespace(entropy_coeff=coeff, entropy_ctrl=control))


entropies = st.one_of(st.floats(0, 1), st.sampled_from([0.2, math.nan, math.inf]))


@some_examples
@given(measured=st.lists(entropies, max_size=30), low=st.sampled_from([0.0, 0.002]), stop=st.integers(0, 30))
def test_the_adaptive_weight_follows_its_formula_and_survives_a_restart(measured, low, stop):
    controller = adaptive(low=low)
    weights = []
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
    controller = adaptive(coeff=0.0, delta=0.001)
    entropy = 0.8
    seen = []
    for _ in range(400):
        entropy = max(entropy - 0.01 + controller.value, 0.0)
        controller.update(entropy)
        seen.append(entropy)
    assert min(seen[200:]) > 0.1 and max(seen[200:]) < 0.3
