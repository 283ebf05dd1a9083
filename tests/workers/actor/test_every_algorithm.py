"""The rules that hold for every policy loss, aggregation, KL estimator and term, through the real actor."""

import math
from itertools import cycle

import pytest
import torch
from algorithm_cases import SPLITS, ActorFactory, full_batch, reordered, with_other_masked_values
from tiny_training import assert_same_gradients

from verl.trainer.ppo.core_algos import (
    KL_PENALTIES,
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    loss_traits,
)
from verl.workers.actor import dp_actor

# So that losses which choose tokens choose a few of some 40, and every term of a loss is there.
SELECTIVE = {
    "policy_loss__clip_cov_ratio": 0.2,
    "policy_loss__clip_cov_lb": -1.0,
    "policy_loss__kl_cov_ratio": 0.2,
    "policy_loss__ipo_kl_tau": 0.1,
}
# Each loss in one aggregation, and each aggregation with one loss: what they do is apart (`token_loss`).
PAIRS = [
    *zip(POLICY_LOSS_REGISTRY, cycle(LOSS_AGG_MODES), strict=False),
    *(("vanilla", m) for m in LOSS_AGG_MODES),
]
LOSSES = {
    f"{loss}, {mode}": {"policy_loss__loss_mode": loss, "loss_agg_mode": mode, **SELECTIVE}
    for loss, mode in PAIRS
}
TERMS = {
    **{
        f"KL {name}": {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": name}
        for name in KL_PENALTIES
    },
    "own loss": {"policy_loss__loss_mode": "algorithm_cases:own_loss"},
    "echo": {"echo_coeff": 0.3},
    "no entropy bonus": {"entropy_coeff": 0.0},
    "adaptive entropy": {"entropy_ctrl__target_entropy": 0.1},
    "scale factor": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 3.0},
    "dual clip": {"clip_ratio_c": 1.5},
}
CASES = LOSSES | TERMS


@pytest.fixture(scope="module")
def factory(model_path):
    return ActorFactory(model_path)


@pytest.fixture(scope="module")
def whole(factory):
    """case -> (metrics, gradient) of the whole mini-batch in one pass, made once."""
    made = {}

    def update(case):
        if case not in made:
            made[case] = factory.update(full_batch(), **CASES[case])
        return made[case]

    return update


@pytest.mark.parametrize("case", CASES)
def test_rule_3_what_was_not_sampled_has_no_influence_bit_by_bit(factory, whole, case):
    """Its ids neither, if nothing sampled comes after them (echo learns from them)."""
    dirty = with_other_masked_values(full_batch(), keep_observations="echo" in case)
    metrics, gradient = factory.update(dirty, **CASES[case])
    expected_metrics, expected = whole(case)
    for name, want in expected.items():
        assert torch.equal(gradient[name], want), name
    assert metrics == expected_metrics and all(map(math.isfinite, metrics.values()))
    assert sum(want.abs().sum() for want in expected.values()) > 0


# Each case is split in one way, neighbouring cases in others.
@pytest.mark.parametrize(
    ("case", "split"), list(zip(CASES, cycle(["rows of 3, padded", "60 tokens"]), strict=False))
)
def test_rule_5_every_split_gives_the_same_loss_and_gradient(factory, whole, case, split):
    metrics, gradient = factory.update(reordered(full_batch()), SPLITS[split], **CASES[case])
    expected_metrics, expected = whole(case)
    assert_same_gradients(gradient, expected, tolerance=2e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loss", list(POLICY_LOSS_REGISTRY))
def test_rule_4_the_first_on_policy_ratio_is_1_for_every_loss(factory, loss):
    """Whatever old_log_probs say: they are those of these weights, and are not read."""
    settings = {"policy_loss__loss_mode": loss, **SELECTIVE}
    batch = full_batch()
    other = full_batch()
    other.batch["old_log_probs"] -= 1.0
    for data in (batch, other):
        data.meta_info["bypass_mode"] = False
    (metrics, gradient), (_, other_gradient) = (factory.update(data, **settings) for data in (batch, other))
    assert metrics["actor/ratio/min"] == metrics["actor/ratio/max"] == 1.0
    assert metrics.get("actor/ppo_kl", 0.0) == 0.0
    assert all(torch.equal(gradient[name], other_gradient[name]) for name in gradient)


@pytest.mark.parametrize(
    "loss", [loss for loss in POLICY_LOSS_REGISTRY if loss_traits(loss).vanishes_with_advantage]
)
def test_rows_without_an_advantage_cost_no_backward_pass_and_change_nothing(factory, monkeypatch, loss):
    settings = {"policy_loss__loss_mode": loss, "entropy_coeff": 0.0, **SELECTIVE}
    batch = full_batch()
    limits = SPLITS["rows of 3, padded"]
    backward = factory.engine._backward
    num_backward = []
    monkeypatch.setattr(
        factory.engine, "_backward", lambda *a, **k: num_backward.append(1) or backward(*a, **k)
    )
    metrics, gradient = factory.update(batch, limits, **settings)
    assert len(num_backward) == 2  # of 7 rows one sampled nothing, two have no advantage
    monkeypatch.setattr(dp_actor, "rows_without_gradient", lambda *_: [])
    expected_metrics, expected = factory.update(batch, limits, **settings)
    assert len(num_backward) == 2 + 2
    assert_same_gradients(gradient, expected, tolerance=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("loss", [loss for loss in POLICY_LOSS_REGISTRY if loss != "sft"])
def test_rollout_weights_of_2_make_the_policy_loss_twice_as_large(factory, loss):
    batch = full_batch()
    settings = {"policy_loss__loss_mode": loss, "entropy_coeff": 0.0, **SELECTIVE}
    batch.batch["rollout_is_weights"] = batch.batch["response_mask"].float()
    _, gradient = factory.update(batch, **settings)
    batch.batch["rollout_is_weights"] *= 2
    _, doubled = factory.update(batch, **settings)
    assert_same_gradients(doubled, {name: 2 * g for name, g in gradient.items()}, tolerance=1e-5)
