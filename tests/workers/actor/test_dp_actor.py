"""The policy's update: the rules about what takes part, and the loss against a plain full-logits one."""

import math

import pytest
import torch
from tiny_training import (
    assert_same_gradients,
    gradients_of,
    make_actor,
    make_batch,
    make_config,
    reference_log_probs,
)

from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine.update_loop import MicroBatchLimits, pack_micro_batches, tensors_of

ALL_ROWS = MicroBatchLimits(None, None, padded=False)


def update(model_path, batch, *overrides, epochs=1):
    """(metrics, gradients of each optimizer step) of update_policy on a fresh actor that is not stepped."""
    actor = make_actor(make_config(model_path, f"actor_rollout_ref.actor.ppo_epochs={epochs}", *overrides))
    return gradients_of(actor.engine, lambda: actor.update_policy(batch))


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_log_probs_and_entropies_equal_hugging_faces_own(model_path, temperature):
    actor = make_actor(make_config(model_path))
    batch = make_batch()
    log_probs = compute_log_prob(actor.engine, batch, ALL_ROWS, temperature)
    _, (part,) = pack_micro_batches(tensors_of(batch), range(len(batch)), actor.engine, ALL_ROWS)
    _, entropy, _ = actor.engine.module(part, temperature, True)
    _, expected_log_probs, expected_entropys = reference_log_probs(model_path, batch, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part.unpack(entropy), expected_entropys[part.rows], rtol=1e-4, atol=1e-5)
    assert not log_probs.requires_grad and log_probs[batch.batch["response_mask"] == 0].abs().max() == 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_the_gradient_equals_autograd_through_full_logits(model_path, mode):
    batch = make_batch()
    _, recorded = update(
        model_path,
        batch,
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.ppo_micro_batch_size=3",
        "actor_rollout_ref.actor.clip_ratio_c=3.0",
        epochs=2,
    )
    model, log_prob, entropy = reference_log_probs(model_path, batch)
    mask = batch.batch["response_mask"]
    advantages = batch.batch["advantages"]
    ratio = (log_prob - batch.batch["old_log_probs"]).exp()
    pg = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    pg = torch.where(advantages < 0, torch.minimum(pg, -advantages * 3.0), pg)
    kl = kl_penalty(log_prob, batch.batch["ref_log_prob"], "low_var_kl")
    agg_loss(pg - 0.01 * entropy + 0.1 * kl, mask, mode).backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    assert_same_gradients(recorded[1], expected, tolerance=2e-5)  # the second epoch's is off-policy


SPLITS = {
    "micro-batches of 1": ["actor_rollout_ref.actor.ppo_micro_batch_size=1"],
    "micro-batches of 3": ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"],
    "token budget": [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30",
    ],
    "padded": ["actor_rollout_ref.model.use_remove_padding=false"],
    "padded, token budget": [
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",
    ],
    "gradient checkpointing": ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("split", SPLITS)
def test_rule_5_loss_and_gradient_are_the_same_for_every_split(model_path, split, mode):
    common = [f"actor_rollout_ref.actor.loss_agg_mode={mode}", "actor_rollout_ref.actor.use_kl_loss=true"]
    metrics, recorded = update(model_path, make_batch(), *common, epochs=2)
    split_metrics, split_recorded = update(model_path, make_batch(), *common, *SPLITS[split], epochs=2)
    for got, want in zip(split_recorded, recorded, strict=True):
        assert_same_gradients(got, want)
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-8)


def test_rule_4_the_first_on_policy_ratio_is_exactly_1(model_path):
    batch = make_batch(num_rows=16)
    actor = make_actor(make_config(model_path))
    with_old, (first, second) = gradients_of(actor.engine, lambda: actor.update_policy(batch))
    one = make_batch(num_rows=16)[:8]
    one.batch.pop("old_log_probs")
    metrics, recorded = update(model_path, one)
    assert metrics["actor/ratio/min"] == metrics["actor/ratio/max"] == 1.0
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
    for name in first:
        assert torch.equal(
            recorded[0][name], first[name]
        )  # old_log_probs are not read in the first mini-batch
        assert not torch.equal(second[name], first[name])
    assert with_old["actor/ratio/max"] > 1.0 > with_old["actor/ratio/min"]  # they are in the second


def test_rule_3_only_sampled_tokens_take_part_bit_by_bit(model_path):
    overrides = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.clip_ratio_c=2.0"]
    clean = make_batch()
    dirty = make_batch(pad_id=17)
    masked = dirty.batch["response_mask"] == 0
    for key in ("advantages", "old_log_probs", "ref_log_prob"):
        dirty.batch[key][masked] = float("nan")
    dirty.batch["position_ids"][dirty.batch["attention_mask"] == 0] = 77
    dirty.batch["input_ids"][3] = 11  # the row that sampled nothing
    (metrics, recorded), (dirty_metrics, dirty_recorded) = (
        update(model_path, batch, *overrides, epochs=2) for batch in (clean, dirty)
    )
    assert metrics == dirty_metrics and all(map(math.isfinite, metrics.values()))
    for got, want in zip(dirty_recorded, recorded, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_rule_3_a_sampled_token_does_take_part(model_path):
    changed = make_batch()
    row, column = changed.batch["response_mask"].nonzero()[5].tolist()
    changed.batch["advantages"][row, column] += 1.0
    (_, recorded), (_, changed_recorded) = (update(model_path, batch) for batch in (make_batch(), changed))
    assert all(not torch.equal(changed_recorded[0][name], recorded[0][name]) for name in recorded[0])


def test_mini_batches_epochs_and_shuffle_make_the_steps_they_name(model_path):
    batch = make_batch(num_rows=20)
    plain = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    _, recorded = update(model_path, batch, *plain, epochs=2)
    assert len(recorded) == 6  # 7, 7 and 6 rows, twice
    shuffled = [
        update(model_path, batch, *plain, "actor_rollout_ref.actor.shuffle=true", epochs=2) for _ in range(2)
    ]
    for got, again in zip(shuffled[0][1], shuffled[1][1], strict=True):
        assert all(torch.equal(got[name], again[name]) for name in got)
    assert any(not torch.equal(shuffled[0][1][0][name], recorded[0][name]) for name in recorded[0])
    del batch.batch["old_log_probs"]
    with pytest.raises(ValueError, match="6 optimizer steps on 20 rows, but the batch has no old_log_probs"):
        update(model_path, batch, *plain, epochs=2)


@pytest.mark.parametrize("loss_mode", ["gpg", "sft"])
def test_a_loss_without_a_ratio_takes_several_steps_without_old_log_probs_and_shows_no_ratio(
    model_path, loss_mode
):
    settings = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"
    _, recorded = update(model_path, make_batch(), settings, epochs=2)
    batch = make_batch()
    del batch.batch["old_log_probs"]
    metrics, without = update(model_path, batch, settings, epochs=2)
    for got, want in zip(without, recorded, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert not {"actor/ppo_kl", "actor/ratio/min", "actor/ratio/max"} & set(metrics)
    assert {"actor/ratio/min", "actor/ratio/max"} <= set(update(model_path, batch, settings)[0])


def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped_and_counted(model_path):
    actor = make_actor(make_config(model_path))
    before = [p.detach().clone() for p in actor.engine.module.parameters()]
    batch = make_batch()
    batch.batch["advantages"] *= float("inf")
    metrics = actor.update_policy(batch)
    assert metrics["actor/num_skipped_updates"] == 1 and "actor/pg_loss" not in metrics
    assert all(torch.equal(p, q) for p, q in zip(actor.engine.module.parameters(), before, strict=True))
    metrics = actor.update_policy(make_batch())
    assert metrics["actor/num_skipped_updates"] == 0 and math.isfinite(metrics["actor/grad_norm"])
    assert not any(torch.equal(p, q) for p, q in zip(actor.engine.module.parameters(), before, strict=True))


@pytest.mark.parametrize("num_empty", [8, 12])
def test_a_mini_batch_without_a_sampled_token_makes_no_step_and_is_counted(model_path, num_empty):
    actor = make_actor(make_config(model_path))
    batch = make_batch(12)
    batch.batch["response_mask"][:num_empty] = 0
    metrics = actor.update_policy(batch)
    num_steps = (12 - num_empty) // 4  # of two mini-batches, of 6 rows each
    assert actor.engine.weights_version == num_steps
    assert metrics["actor/num_skipped_updates"] == 2 - num_steps and actor.engine.num_training_steps == 1
    assert "no trajectory of the mini-batch has a token to learn from" in actor.loop.skipped_update
    assert ("actor/grad_norm" in metrics) == (num_steps > 0)
