"""scripts/convert_checkpoint.py: round trips are bitwise, a converted start trains, mistakes are named."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import make_actor, make_batch, make_config, make_critic, save, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.checkpoints.run_state import CheckpointStore, RunState
from verl.workers.engine.snapshot import BackgroundWriter

SCRIPT = Path(__file__).parents[3] / "scripts" / "convert_checkpoint.py"
spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
assert spec is not None and spec.loader is not None
convert = importlib.util.module_from_spec(spec)
spec.loader.exec_module(convert)


def run(*arguments):
    return convert.main([str(argument) for argument in arguments])


def saved_run(folder, base, *overrides):
    """A step's folder as a run leaves it."""
    actor = make_actor(make_config(base, *overrides))
    actor.update_policy(make_batch())
    part = folder / "global_step_3" / "actor"
    tokenizer = AutoTokenizer.from_pretrained(base)
    snapshots = [
        actor.engine.snapshot(part),
        actor.engine.snapshot_hf(part / "huggingface", tokenizer, base, part),
    ]
    BackgroundWriter().write(snapshots, part, background=False)
    RunState(step=3).save(part.parent)
    return part.parent


def assert_same_folder(got, want):
    names = {path.name for path in want.iterdir()}
    assert {path.name for path in got.iterdir()} == names
    for name in names:
        assert (got / name).read_bytes() == (want / name).read_bytes(), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_becomes_its_hugging_face_folder_and_back_bit_by_bit(tmp_path, tied):
    step = saved_run(tmp_path, write_model(tmp_path / "base", tied))
    assert run("to-hf", step, tmp_path / "hf") == 0
    assert_same_folder(tmp_path / "hf", step / "actor" / "huggingface")
    assert run("from-hf", tmp_path / "hf", tmp_path / "start") == 0
    assert run("to-hf", tmp_path / "start" / "global_step_0" / "actor", tmp_path / "again") == 0
    assert_same_folder(tmp_path / "again", tmp_path / "hf")
    assert CheckpointStore(tmp_path / "start", None).steps() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_folder_of_another_library_keeps_its_bits_and_type(tmp_path, dtype):
    base = Path(write_model(tmp_path / "base", tied=True))
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((base / name).read_bytes())
    assert run("from-hf", tmp_path / "other", tmp_path / "start") == 0
    assert run("to-hf", tmp_path / "start" / "global_step_0", tmp_path / "hf") == 0
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "other"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == dtype for name, tensor in want.items())
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == dtype


def test_adapters_are_merged_into_their_base(tmp_path):
    step = saved_run(tmp_path, write_model(tmp_path / "base"), "actor_rollout_ref.model.lora_rank=2")
    assert run("to-hf", step, tmp_path / "hf") == 0
    assert_same_folder(tmp_path / "hf", step / "actor" / "huggingface")


def test_mistakes_are_named(tmp_path, capsys, model_path):
    def error(*arguments):
        assert run(*arguments) == 2
        return capsys.readouterr().err

    assert "holds no checkpoint" in error("show", tmp_path)
    assert "without .incomplete" in error("show", tmp_path / "global_step_4.incomplete")
    assert "no config.json" in error("from-hf", tmp_path, tmp_path / "out")
    step = saved_run(tmp_path, model_path)
    assert "there already, and not empty" in error("to-hf", step, tmp_path)
    (step / "actor" / "huggingface" / "config.json").rename(tmp_path / "config.json")
    assert "with --like" in error("to-hf", step, tmp_path / "out")
    assert run("to-hf", step, tmp_path / "out", "--like", model_path) == 0
    save(make_critic(make_config(model_path)).engine, tmp_path / "critic")
    assert "is a critic" in error("to-hf", tmp_path / "critic", tmp_path / "out2")
    other = json.loads((Path(model_path) / "config.json").read_text())
    other |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    assert "more tensors of the model" in error(
        "to-hf", step, tmp_path / "out3", "--like", tmp_path / "other"
    )


def test_training_starts_from_a_converted_folder_as_from_the_model_itself(tmp_path, model_path, capsys):
    assert run("from-hf", model_path, tmp_path) == 0
    assert f"trainer.resume_from_path={tmp_path / 'global_step_0'}\n" in capsys.readouterr().out
    plain, started = (make_actor(make_config(model_path)) for _ in range(2))
    with torch.no_grad():
        for parameter in started.engine.module.parameters():
            parameter.zero_()
    started.engine.load(tmp_path / "global_step_0" / "actor")
    assert started.engine.num_training_steps == 0
    for seed in (1, 2):
        assert started.update_policy(make_batch(seed=seed)) == plain.update_policy(make_batch(seed=seed))
