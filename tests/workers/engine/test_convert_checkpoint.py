"""scripts/convert_checkpoint.py: round trips are bitwise, a converted start trains, mistakes are named."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_training import make_actor, make_batch, make_config, make_critic, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.trainer.ppo.run_state import CheckpointStore, RunState
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


def test_adapters_are_merged_into_their_base(tmp_path):
    step = saved_run(tmp_path, write_model(tmp_path / "base"), "actor_rollout_ref.model.lora_rank=2")
    assert run("to-hf", step, tmp_path / "hf") == 0
    assert_same_folder(tmp_path / "hf", step / "actor" / "huggingface")


def test_the_settings_that_questions_are_asked_with_go_along(tmp_path, model_path):
    step = saved_run(tmp_path, model_path)
    lengths = {f"max_{name}_length": 7 for name in ("start", "prompt", "response", "obs")}
    asking = {"max_turns": 2, "retriever": {"topk": 1}, "data": lengths}
    retriever = {"topk": 1, "url": "http://me:secret@a:1"}
    OmegaConf.save(asking | {"retriever": retriever, "trainer": {"seed": 3}}, tmp_path / "config.yaml")
    assert run("to-hf", step, tmp_path / "hf") == 0
    assert OmegaConf.load(tmp_path / "hf" / "config.yaml") == asking
    assert run("to-hf", step / "actor", tmp_path / "again") == 0
    assert_same_folder(tmp_path / "again", tmp_path / "hf")
    OmegaConf.save({"model": {"partial_pretrain": "x"}}, tmp_path / "config.yaml")  # a supervised run
    assert run("to-hf", step, tmp_path / "supervised") == 0
    assert not (tmp_path / "supervised" / "config.yaml").exists()


def test_a_folder_that_is_not_meant_is_answered_with_the_one_that_may_be(tmp_path, capsys, model_path):
    def error(*arguments):
        assert run(*arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        return said

    out, step = tmp_path / "out", saved_run(tmp_path / "run", model_path)
    there = error("to-hf", tmp_path / "run" / "global_step_99", out)
    assert f"There is no folder {tmp_path}/run/global_step_99; the checkpoints there are {step}." in there
    assert f"is no step's folder; the checkpoints there are {step}." in error("to-hf", tmp_path / "run", out)
    assert error("show", tmp_path / "no").endswith(f"There is no folder {tmp_path}/no.\n")
    assert f"give {step}/actor/huggingface." in error("from-hf", step, out)
    assert f"give {step}/actor/huggingface." in error("from-hf", step / "actor", out)
    assert f"the checkpoints there are {step}, each with" in error("from-hf", tmp_path / "run", out)
    assert "There is no folder" in error("from-hf", tmp_path / "no", out)
    (step / "actor" / "huggingface").rename(tmp_path / "moved")
    assert f"make one of it: to-hf {step} OUT." in error("from-hf", step, out)
    assert not out.exists()


def test_show_says_what_is_in_a_step(tmp_path, capsys, model_path):
    step = saved_run(tmp_path, model_path)
    make_critic(make_config(model_path)).engine.save(step / "critic")
    assert run("show", step) == 0
    shown = capsys.readouterr().out
    assert "step 3" in shown and "Qwen3ForCausalLM" in shown
    assert "whole weights: " in shown and "whole weights, a value head: " in shown
    assert "exp_avg_sq" in shown and "training steps 1, updates 1, random states of 1 processes" in shown


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
    make_critic(make_config(model_path)).engine.save(tmp_path / "critic")
    assert "is a critic" in error("to-hf", tmp_path / "critic", tmp_path / "out2")
    other = json.loads((Path(model_path) / "config.json").read_text())
    other |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    assert "more tensors of the model" in error(
        "to-hf", step, tmp_path / "out3", "--like", tmp_path / "other"
    )
