"""Checkpoints written in the background: the state of the moment, whole files, errors that are not lost."""

import copy
import threading

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import make_actor, make_batch, make_config, save, save_hf, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.workers.engine.reference import Reference
from verl.workers.engine.snapshot import BackgroundWriter, CheckpointFailed, Snapshot


@pytest.fixture
def writer():
    made = BackgroundWriter()
    yield made
    made.close()


@pytest.mark.parametrize("fails", ["copy", "write"])
def test_an_error_of_the_background_is_raised_whenever_asked_and_frees_the_state(writer, tmp_path, fails):
    def fail():
        raise OSError(28, "No space left on device")

    snapshot = Snapshot(fail, lambda: None) if fails == "copy" else Snapshot(lambda: None, fail)
    writer.write([snapshot], tmp_path, background=True)
    for _ in range(2):
        with pytest.raises(CheckpointFailed, match="OSError: .* No space left on device"):
            writer.is_done(wait=True)
    snapshot.wait_until_taken()
    writer.write([Snapshot(write=lambda: None)], tmp_path, background=True)
    assert writer.is_done(wait=True)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_rule_10_what_is_written_in_the_background_is_the_state_before_the_next_update(
    writer, tmp_path, tied, lora_rank
):
    base = write_model(tmp_path / "base", tied)
    config = make_config(base, f"actor_rollout_ref.model.lora_rank={lora_rank}")
    actor = make_actor(config)
    tokenizer = AutoTokenizer.from_pretrained(base)
    actor.update_policy(make_batch(seed=1))
    save(actor.engine, tmp_path / "at once")
    save_hf(actor.engine, tmp_path / "at once hf", tokenizer, base)
    late = tmp_path / "late"
    hf = tmp_path / "late" / "huggingface"
    snapshots = [actor.engine.snapshot(late), actor.engine.snapshot_hf(hf, tokenizer, base, late)]
    writer.write(snapshots, late, background=True)
    going_on = [actor.update_policy(make_batch(seed=seed)) for seed in (2, 3)]
    assert writer.is_done(wait=True)
    for folder in (late, tmp_path / "at once"):
        resumed = make_actor(config)
        resumed.engine.load(folder)
        assert [resumed.update_policy(make_batch(seed=seed)) for seed in (2, 3)] == going_on
    files = {path.name for path in (tmp_path / "at once hf").iterdir()}
    assert {path.name for path in hf.iterdir()} == files and "config.json" in files
    for name in files - {"model.safetensors"}:
        assert (hf / name).read_bytes() == (tmp_path / "at once hf" / name).read_bytes(), name
    written, expected = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "at once hf"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert AutoModelForCausalLM.from_pretrained(hf).config.tie_word_embeddings == tied


def test_adapters_are_swapped_for_the_reset_references_after_the_copy(tmp_path, model_path):
    """Else the checkpoint would hold the reference's adapters, not the trained ones."""
    actor = make_actor(make_config(model_path, "actor_rollout_ref.model.lora_rank=2"))
    reference = Reference(actor.engine, None)
    reference.reset()
    actor.update_policy(make_batch())
    expected = copy.deepcopy(actor.engine.adapters.parameters())
    snapshot = actor.engine.snapshot(tmp_path)

    def compute_reference():
        with reference.active():
            pass

    thread = threading.Thread(target=compute_reference)
    thread.start()
    thread.join(0.3)
    waits = thread.is_alive()
    snapshot.copy()
    thread.join()
    snapshot.write()
    assert waits
    resumed = make_actor(make_config(model_path, "actor_rollout_ref.model.lora_rank=2"))
    resumed.engine.load(tmp_path)
    for name, parameter in resumed.engine.adapters.parameters().items():
        assert torch.equal(parameter, expected[name])


def test_an_update_waits_for_the_copy(tmp_path, model_path):
    actor = make_actor(make_config(model_path))
    snapshot = actor.engine.snapshot(tmp_path)
    updates = threading.Thread(target=actor.update_policy, args=(make_batch(),))
    updates.start()
    updates.join(0.3)
    assert updates.is_alive() and actor.engine.weights_version == 0
    snapshot.copy()
    updates.join()
    assert actor.engine.weights_version == 1
