"""LoRA and the reference in the workers: rollouts of merged weights, the base as reference, its resets."""

import pytest
import torch
from one_turn_agent import OneTurnAgent, gen_batch
from tiny_training import make_batch, make_config

from verl.workers.fsdp_workers import ActorRolloutRefWorker

LORA = "actor_rollout_ref.model.lora_rank=4"
KINDS = {"lora": [LORA], "full": []}


def actor_group(make_group, model_path, *overrides, role="actor_rollout_ref"):
    config = make_config(model_path, "actor_rollout_ref.actor.optim.lr=0.03", *overrides)
    return make_group(ActorRolloutRefWorker, config.actor_rollout_ref, role, OneTurnAgent)


def log_probs(group):
    return group.compute_log_prob(make_batch()).batch["old_log_probs"]


def reference(group):
    return group.compute_ref_log_prob(make_batch()).batch["ref_log_prob"]


def test_rollouts_sample_from_the_merged_weights_of_each_update(make_group, model_path):
    group = actor_group(make_group, model_path, LORA, role="actor_rollout")
    for _ in range(3):
        batch = group.generate_sequences(gen_batch())
        trained = group.compute_log_prob(batch).batch["old_log_probs"]
        torch.testing.assert_close(batch.batch["rollout_log_probs"], trained, rtol=0, atol=1e-4)
        batch.batch["advantages"] = torch.ones_like(trained)
        group.update_actor(batch)
        assert group.compute_log_prob(batch).batch["old_log_probs"].mean() > trained.mean() + 0.01


def test_with_lora_the_reference_is_the_base_in_the_same_engine(make_group, model_path):
    base = log_probs(actor_group(make_group, model_path, role="actor"))
    group = actor_group(make_group, model_path, LORA)
    assert group._worker.reference.own_engine is None
    assert torch.equal(reference(group), base)
    group.update_actor(make_batch(seed=1))
    group.update_actor(make_batch(seed=2))
    after = log_probs(group)
    assert not torch.equal(after, base)
    assert torch.equal(reference(group), base)
    assert torch.equal(log_probs(group), after)  # the adapters are on again


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_reference_is_the_policy_of_that_moment(make_group, model_path, kind):
    group = actor_group(make_group, model_path, *KINDS[kind])
    group.update_actor(make_batch(seed=1))
    then = log_probs(group)
    group.reset_reference()
    assert torch.equal(reference(group), then)
    group.update_actor(make_batch(seed=2))
    after = log_probs(group)
    assert torch.equal(reference(group), then) and not torch.equal(after, then)
    assert torch.equal(log_probs(group), after)
    group.reset_reference()
    assert torch.equal(reference(group), after)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_10_a_resumed_run_has_the_reset_reference(make_group, model_path, tmp_path, kind):
    group, resumed = (actor_group(make_group, model_path, *KINDS[kind]) for _ in range(2))
    started = reference(group)
    group.update_actor(make_batch(seed=1))
    group.save_checkpoint(str(tmp_path / "before"))
    group.reset_reference()
    group.update_actor(make_batch(seed=2))
    group.save_checkpoint(str(tmp_path / "after"))
    resumed.load_checkpoint(str(tmp_path / "before"))
    assert torch.equal(reference(resumed), started)
    resumed.load_checkpoint(str(tmp_path / "after"))
    assert torch.equal(reference(resumed), reference(group))
    assert torch.equal(log_probs(resumed), log_probs(group))


@pytest.mark.slow
def test_rule_10_a_loaded_adapter_samples_and_trains_as_the_saved_run_did(make_group, model_path, tmp_path):
    group, resumed = (actor_group(make_group, model_path, LORA) for _ in range(2))
    group.update_actor(make_batch(seed=1))
    group.save_checkpoint(str(tmp_path / "actor"))
    resumed.generate_sequences(gen_batch())  # its engine exists, with older weights
    resumed.load_checkpoint(str(tmp_path / "actor"))
    sampled = [g.generate_sequences(gen_batch()).batch["responses"] for g in (group, resumed)]
    assert torch.equal(*sampled)
    metrics = [g.update_actor(make_batch(seed=2)).meta_info for g in (group, resumed)]
    assert metrics[0] == metrics[1]
