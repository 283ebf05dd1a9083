"""The workers as a trainer uses them: sample with the native engine, log-probs, updates, checkpoints, in
one process.
"""

from types import SimpleNamespace

import pytest
import torch
from one_turn_agent import OneTurnAgent, gen_batch
from tiny_training import make_batch, make_config, write_model

from verl.sessions.engine_contract import SamplingParams
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker


def actor_group(make_group, model_path, role="actor_rollout_ref", *overrides):
    config = make_config(model_path, *overrides)
    return make_group(ActorRolloutRefWorker, config.actor_rollout_ref, role, OneTurnAgent)


def test_rollout_log_probs_are_the_trainers_own_before_and_after_updates(make_group, model_path):
    """The engine reads the weights that are trained: what it says of a token is what the trainer says."""
    group = actor_group(make_group, model_path)
    seen = []
    for _ in range(3):
        batch = group.generate_sequences(gen_batch())
        log_probs = group.compute_log_prob(batch).batch["old_log_probs"]
        torch.testing.assert_close(batch.batch["rollout_log_probs"], log_probs, rtol=1e-4, atol=2e-5)
        seen.append(log_probs)
        batch.batch["advantages"] = torch.ones_like(log_probs)
        metrics = group.update_actor(batch).meta_info["metrics"]
        assert metrics["actor/ratio/min"] == metrics["actor/ratio/max"] == 1.0
    assert seen[2].mean() > seen[0].mean() + 0.3  # what was sampled has become likelier


def test_with_offloaded_weights_the_rollout_engine_holds_none_between_uses(make_group, model_path):
    """Set by hand here: the key acts on CUDA, where the engine's references would keep memory taken."""
    group = actor_group(make_group, model_path)
    first = group.generate_sequences(gen_batch()).batch
    expected = first["responses"]
    log_probs = first["rollout_log_probs"]
    worker = group._worker
    worker.engine.offloads_params = True
    for _ in range(2):
        assert torch.equal(group.generate_sequences(gen_batch()).batch["responses"], expected)
        engine = worker.rollout_engine
        session = engine.open([5], SamplingParams(1))
        with pytest.raises(RuntimeError, match="asleep"):
            engine.step()
        engine.wake()
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.step()
        engine.close(session)
    group.update_actor(make_batch())
    group.sync_weights()
    assert engine.version == -1  # the next generation brings them
    updated = group.generate_sequences(gen_batch()).batch["rollout_log_probs"]
    assert updated.shape != log_probs.shape or not torch.equal(updated, log_probs)


def test_between_rollouts_the_kv_cache_is_given_back_unless_it_is_to_stay(make_group, model_path):
    for keeps in (False, True):
        group = actor_group(
            make_group,
            model_path,
            "actor_rollout",
            f"actor_rollout_ref.rollout.free_cache_engine={not keeps}",
        )
        first, again = (group.generate_sequences(gen_batch()).batch["responses"] for _ in range(2))
        assert torch.equal(first, again)
        assert (group._worker.rollout_engine.sleep(1) > 0) == keeps  # bytes that were still held


def test_the_reference_stays_where_training_started(make_group, model_path):
    group = actor_group(make_group, model_path)
    batch = make_batch()
    before = group.compute_ref_log_prob(batch).batch["ref_log_prob"]
    assert torch.equal(before, group.compute_log_prob(batch).batch["old_log_probs"])
    group.update_actor(batch)
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    assert not torch.equal(group.compute_log_prob(batch).batch["old_log_probs"], before)


def test_the_teacher_is_a_frozen_model_of_its_own_that_distillation_learns_from(
    make_group, model_path, tmp_path
):
    teacher_path = write_model(tmp_path / "teacher", tied=False)
    overrides = (
        f"actor_rollout_ref.teacher.path={teacher_path}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=distillation",
    )
    group = actor_group(make_group, model_path, "actor", *overrides)
    batch = make_batch()
    expected = actor_group(make_group, teacher_path, "actor").compute_log_prob(batch).batch["old_log_probs"]
    teacher = group.compute_teacher_log_prob(batch).batch["teacher_log_prob"]
    assert torch.equal(teacher, expected)
    batch.batch["teacher_log_prob"] = teacher
    policy = group.compute_log_prob(batch).batch["old_log_probs"]
    metrics = group.update_actor(batch).meta_info["metrics"]
    distance = (policy - teacher)[batch.batch["response_mask"].bool()].mean().item()
    assert metrics["actor/distillation_kl"] == pytest.approx(distance, rel=1e-4)
    assert not torch.equal(group.compute_log_prob(batch).batch["old_log_probs"], policy)
    assert torch.equal(group.compute_teacher_log_prob(batch).batch["teacher_log_prob"], teacher)
    assert not hasattr(actor_group(make_group, model_path, "actor")._worker, "teacher_engine")


def test_why_an_update_was_skipped_goes_to_the_driver_and_its_count_into_checkpoints(
    make_group, model_path, tmp_path
):
    config = make_config(model_path)
    pairs = [
        (actor_group(make_group, model_path, "actor"), "update_actor", "advantages"),
        (make_group(CriticWorker, config.critic), "update_critic", "returns"),
    ]
    for group, method, key in pairs:
        batch = make_batch()
        batch.batch[key][0, 0] = float("nan")
        said = getattr(group, method)(batch).meta_info
        name = method.removeprefix("update_")
        assert said["metrics"][f"{name}/num_skipped_in_a_row"] == 1
        assert "nan at place 0 of the response of row 0" in said["skipped_update"]
        group.save_checkpoint(str(tmp_path / name))
        getattr(group, method)(make_batch())
        group.load_checkpoint(str(tmp_path / name))
        assert getattr(group, method)(batch).meta_info["metrics"][f"{name}/num_skipped_in_a_row"] == 2
        (tmp_path / name / "update.json").unlink()
        with pytest.raises(ValueError, match="has no update.json; expected a folder that a run saved"):
            group.load_checkpoint(str(tmp_path / name))


def test_rule_10_a_loaded_checkpoint_samples_and_trains_as_the_saved_run_did(
    make_group, model_path, tmp_path
):
    group, resumed = (actor_group(make_group, model_path) for _ in range(2))
    group.update_actor(make_batch(seed=1))
    group.save_checkpoint(str(tmp_path / "actor"))
    resumed.generate_sequences(gen_batch())  # its engine exists, with older weights
    resumed.load_checkpoint(str(tmp_path / "actor"))
    outcomes = []
    for g in (group, resumed):
        sampled = g.generate_sequences(gen_batch()).batch
        outcomes.append(
            (sampled["responses"], sampled["rollout_log_probs"], g.update_actor(make_batch(seed=2)).meta_info)
        )
    assert torch.equal(outcomes[0][0], outcomes[1][0]) and torch.equal(outcomes[0][1], outcomes[1][1])
    assert outcomes[0][2] == outcomes[1][2]


def test_sync_weights_gives_the_rollout_engine_the_update_before_anybody_generates(make_group, model_path):
    group = actor_group(make_group, model_path)
    group.sync_weights()  # there is no engine yet, and nothing to do
    group.generate_sequences(gen_batch())
    engine = group._worker.rollout_engine
    group.update_actor(make_batch())
    assert engine.version == 0
    group.sync_weights()
    assert engine.version == 1
    synced = group.generate_sequences(gen_batch()).batch["responses"]
    other = actor_group(make_group, model_path)
    other.update_actor(make_batch())
    assert torch.equal(other.generate_sequences(gen_batch()).batch["responses"], synced)


def test_while_a_checkpoint_is_made_the_rollout_engine_sleeps(make_group, model_path, tmp_path):
    """Its memory may be needed then: an optimizer that is offloaded comes to the device."""
    group = actor_group(make_group, model_path)
    group.generate_sequences(gen_batch())
    group.update_actor(make_batch())
    group.sync_weights()
    group.save_checkpoint(str(tmp_path))
    engine = group._worker.rollout_engine
    engine.open([5], SamplingParams(1))
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    assert engine.version == 1  # but it keeps the weights


@pytest.mark.parametrize(("name", "level"), [("vllm", 2), ("native", 1)])
def test_on_a_gpu_vllm_keeps_no_copy_of_weights_that_an_update_replaces(model_path, name, level):
    config = make_config(model_path, f"actor_rollout_ref.rollout.name={name}").actor_rollout_ref
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    levels = []
    worker.config = config
    worker.device = torch.device("cuda")
    worker.engine = SimpleNamespace(offloads_params=False)
    worker._rollout_weights_stale = False
    worker._sleep_if_configured(SimpleNamespace(sleep=levels.append))
    assert levels == [level] and worker._rollout_weights_stale == (level == 2)


def test_after_a_load_the_rollout_engine_takes_the_weights_anew_though_the_version_is_the_same(
    make_group, model_path, tmp_path
):
    """The engine copies the weights here (another dtype), and both runs have made one update."""
    copies = "actor_rollout_ref.rollout.dtype=bfloat16"
    saved, loads = (actor_group(make_group, model_path, "actor_rollout", copies) for _ in range(2))
    for group, seed in ((saved, 1), (loads, 2)):
        group.update_actor(make_batch(seed=seed))
        group.generate_sequences(gen_batch())
    saved.save_checkpoint(str(tmp_path))
    loads.load_checkpoint(str(tmp_path))
    expected, got = (group.generate_sequences(gen_batch()).batch for group in (saved, loads))
    assert torch.equal(got["rollout_log_probs"], expected["rollout_log_probs"])


def test_the_hugging_face_folder_of_a_checkpoint_is_a_base_for_a_new_run(make_group, model_path, tmp_path):
    group = actor_group(make_group, model_path)
    group.update_actor(make_batch())
    group.save_checkpoint(str(tmp_path / "actor"))
    started = actor_group(make_group, str(tmp_path / "actor" / "huggingface"), "actor_rollout")
    expected = group.compute_log_prob(make_batch()).batch["old_log_probs"]
    assert torch.equal(started.compute_log_prob(make_batch()).batch["old_log_probs"], expected)


def test_the_critic_worker_computes_updates_saves_and_loads(make_group, model_path, tmp_path):
    config = make_config(model_path).critic
    group, resumed = (make_group(CriticWorker, config) for _ in range(2))
    before = group.compute_values(make_batch()).batch["values"]
    metrics = group.update_critic(make_batch()).meta_info["metrics"]
    assert {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
    } <= metrics.keys()
    after = group.compute_values(make_batch()).batch["values"]
    assert not torch.equal(before, after)
    group.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    assert torch.equal(resumed.compute_values(make_batch()).batch["values"], after)


def test_mistakes_are_refused_in_words(make_group, model_path):
    with pytest.raises(ValueError, match="role: found 'critic'"):
        ActorRolloutRefWorker(make_config(model_path).actor_rollout_ref, "critic")
    with pytest.raises(ValueError, match="device: found 'tpu'"):
        ActorRolloutRefWorker(make_config(model_path).actor_rollout_ref, "actor", device="tpu")
    batch = make_batch()
    del batch.batch["advantages"]
    with pytest.raises(ValueError, match="the batch has no advantages"):
        actor_group(make_group, model_path, "actor").update_actor(batch)
