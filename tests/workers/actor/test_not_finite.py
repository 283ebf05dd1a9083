"""Updates that are not finite: skipped, counted, explained in words."""

import json
import logging
import math

import pytest
import torch
from algorithm_cases import ActorFactory, Steep, full_batch
from tiny_training import make_actor, make_batch, make_config, make_critic

from verl.protocol import object_array
from verl.workers.actor.dp_actor import PolicyObjective
from verl.workers.engine.training_engine import MicroBatchLoss


@pytest.fixture(scope="module")
def factory(model_path):
    return ActorFactory(model_path)


def spoil(batch, key, row, nth_token, value):
    """Puts a value under the nth sampled token of a row; returns its place in the response."""
    place = int(batch.batch["response_mask"][row].nonzero()[nth_token])
    batch.batch[key][row, place] = value
    return place


@pytest.mark.parametrize("key", ["advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"])
def test_the_first_trajectory_and_token_are_named(factory, caplog, key):
    batch = full_batch()
    spoil(batch, key, 5, 0, math.nan)
    place = spoil(batch, key, 2, 3, math.inf)
    spoil(batch, key, 2, 4, math.nan)
    actor = factory.actor(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    with caplog.at_level(logging.WARNING):
        metrics = actor.update_policy(batch)
    assert metrics["actor/num_skipped_updates"] == metrics["actor/num_skipped_in_a_row"] == 1
    assert f"{key} inf at place {place} of the response of row 2 (step1-0)" in caplog.text
    assert actor.loop.skipped_update in caplog.text


def test_if_only_the_gradient_is_not_finite_its_row_is_named(model_path, monkeypatch):
    actor = make_actor(make_config(model_path))
    batch = make_batch()
    batch.non_tensor_batch["uid"] = object_array([f"step7-{row}" for row in range(8)])
    loss_of = PolicyObjective.loss_of

    def steep_in_row_4(self, part, outputs):
        loss, figures = loss_of(self, part, outputs)
        return MicroBatchLoss(Steep.apply(loss) if 4 in part.rows.tolist() else loss, figures)

    monkeypatch.setattr(PolicyObjective, "loss_of", steep_in_row_4)
    actor.update_policy(batch)
    assert actor.loop.skipped_update == "only the gradient is not finite, that of row 4 (step7-4)"


def test_skips_are_counted_in_a_row_over_training_steps_and_restarts(model_path, monkeypatch):
    actor = make_actor(make_config(model_path, "actor_rollout_ref.actor.ppo_epochs=2"))
    bad = make_batch()
    good = make_batch()
    spoil(bad, "advantages", 0, 0, math.nan)
    counts = [actor.update_policy(batch)["actor/num_skipped_in_a_row"] for batch in (good, bad, bad)]
    assert counts == [0, 2, 4]
    restarted = make_actor(make_config(model_path, "actor_rollout_ref.actor.ppo_epochs=2"))
    restarted.load_state_dict(json.loads(json.dumps(actor.state_dict())))
    assert restarted.loop.skipped_update == actor.loop.skipped_update != ""
    counts = [restarted.update_policy(batch)["actor/num_skipped_in_a_row"] for batch in (bad, good)]
    assert counts == [6, 0]


@pytest.mark.parametrize("key", ["returns", "values"])
def test_the_critics_updates_are_guarded_alike(model_path, key):
    critic = make_critic(make_config(model_path))
    batch = make_batch()
    place = spoil(batch, key, 6, 1, math.nan)
    weights = [p.detach().clone() for p in critic.engine.module.parameters()]
    metrics = critic.update_critic(batch)
    assert metrics["critic/num_skipped_in_a_row"] == 1 and "critic/vf_loss" not in metrics
    assert critic.loop.skipped_update == f"{key} nan at place {place} of the response of row 6"
    assert all(torch.equal(p, q) for p, q in zip(critic.engine.module.parameters(), weights, strict=True))
    assert critic.update_critic(make_batch())["critic/num_skipped_in_a_row"] == 0
