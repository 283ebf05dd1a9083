"""Checkpoints written in the background: the state of the moment, whole files, errors that are not lost."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import make_actor, make_batch, make_config, write_model
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.workers.engine.checkpoint import load_checkpoint
from verl.workers.engine.snapshot import BackgroundWriter, CheckpointFailed, Snapshot


@pytest.fixture
def writer():
    made = BackgroundWriter()
    yield made
    made.close()


def test_snapshots_are_all_copied_before_the_first_is_written(writer, tmp_path):
    done = []
    snapshots = [
        Snapshot(lambda n=n: done.append(f"copy {n}"), lambda n=n: done.append(f"write {n}")) for n in (1, 2)
    ]
    writer.write(snapshots, tmp_path, background=True)
    assert writer.is_done(wait=True)
    assert done == ["copy 1", "copy 2", "write 1", "write 2"]
    done.clear()
    writer.write(snapshots, tmp_path, background=False)
    assert done == ["write 1", "write 2"] and writer.is_done(wait=False)


def test_the_state_may_change_once_it_is_copied_though_it_is_not_yet_written(writer, tmp_path):
    may_write = threading.Event()
    snapshot = Snapshot(lambda: None, may_write.wait)
    writer.write([snapshot], tmp_path, background=True)
    snapshot.wait_until_taken()
    assert not writer.is_done(wait=False)
    may_write.set()
    assert writer.is_done(wait=True) and writer.is_done(wait=False)


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


def test_of_several_ranks_errors_the_first_ranks_is_told(writer, tmp_path):
    def fail():
        raise CheckpointException("write", {rank: (OSError(f"disk {rank}"), None) for rank in (3, 1)})

    writer.write([Snapshot(write=fail)], tmp_path, background=True)
    with pytest.raises(CheckpointFailed, match="^rank 1: OSError: disk 1$"):
        writer.is_done(wait=True)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_rule_10_what_is_written_in_the_background_is_the_state_before_the_next_update(
    writer, tmp_path, tied, lora_rank
):
    base = write_model(tmp_path / "base", tied)
    config = make_config(base, f"actor_rollout_ref.model.lora_rank={lora_rank}")
    actor, tokenizer = make_actor(config), AutoTokenizer.from_pretrained(base)
    actor.update_policy(make_batch(seed=1))
    actor.engine.save(tmp_path / "at once")
    actor.engine.save_hf(tmp_path / "at once hf", tokenizer, base)
    late, hf = tmp_path / "late", tmp_path / "late" / "huggingface"
    snapshots = [actor.engine.snapshot(late), actor.engine.snapshot_hf(hf, tokenizer, base, late)]
    writer.write(snapshots, late, background=True)
    going_on = [actor.update_policy(make_batch(seed=seed)) for seed in (2, 3)]
    assert writer.is_done(wait=True)
    for folder in (late, tmp_path / "at once"):
        resumed = make_actor(config)
        load_checkpoint(resumed.engine, folder)
        assert [resumed.update_policy(make_batch(seed=seed)) for seed in (2, 3)] == going_on
    files = {path.name for path in (tmp_path / "at once hf").iterdir()}
    assert {path.name for path in hf.iterdir()} == files and "config.json" in files
    for name in files - {"model.safetensors"}:
        assert (hf / name).read_bytes() == (tmp_path / "at once hf" / name).read_bytes(), name
    written, expected = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "at once hf"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert AutoModelForCausalLM.from_pretrained(hf).config.tie_word_embeddings == tied


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
