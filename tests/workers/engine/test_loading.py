"""Loading models: what fits is loaded whole, what does not is refused in words."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_training import CPU, make_config
from transformers import Cohere2Config, Cohere2ForCausalLM

from verl.checkpoints.run_state import CheckpointStore, RunState
from verl.config import get_value, replace_values, write_yaml
from verl.planning.placement import decide_machine_settings
from verl.utils.device import bf16_speedup
from verl.workers.engine.loading import Precision, load_policy, load_value_model

BASE_MODEL = Path(__file__).parents[3] / "data_prep" / "base_model"


def load(path, **changes):
    return load_policy({"path": str(path)} | changes, torch.float32)


def test_bad_folders_are_named(tmp_path, model_path):
    with pytest.raises(ValueError, match="/nowhere does not exist"):
        load("/nowhere")
    with pytest.raises(ValueError, match="has no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="has no weights"):
        load(tmp_path)
    with pytest.raises(ValueError, match="model.path is not set"):
        load_policy({"path": None}, torch.float32)


def test_override_config_replaces_values_and_refuses_what_does_not_fit(model_path):
    assert load(model_path, override_config={"rms_norm_eps": 0.5}).model.config.rms_norm_eps == 0.5
    with pytest.raises(ValueError, match="has no field 'rms_eps'"):
        load(model_path, override_config={"rms_eps": 0.5})
    with pytest.raises(ValueError, match="found 2 layers; expected num_hidden_layers=3"):
        load(model_path, override_config={"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})


def test_models_that_transform_their_logits_are_refused(tmp_path):
    config = Cohere2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, logit_scale=0.5, pad_token_id=0,
    )  # fmt: skip
    Cohere2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes its logits by logit_scale"):
        load(tmp_path)


def test_a_critic_is_loaded_without_alarming_reports():
    """LOAD REPORT ... lm_head.weight | UNEXPECTED; "The following layers were not sharded": in every run."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        load_value_model({"path": str(BASE_MODEL)}, torch.float32)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert [record.getMessage() for record in records] == []


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_follows_the_configuration_and_the_device(model_path, name, dtype):
    block = make_config(model_path).actor_rollout_ref.actor.fsdp_config
    block = replace_values(block, {"model_dtype": name})
    assert Precision.from_config(block, CPU) == Precision(dtype, torch.float32)
    block = replace_values(block, {"mixed_precision.param_dtype": name})
    assert Precision.from_config(block, CPU).compute == dtype
    assert load_policy({"path": model_path}, dtype).model.dtype == dtype


@pytest.mark.parametrize(("speedup", "dtype"), [(1.1, "fp32"), (1.4, "bf16")])
def test_fastest_becomes_one_type_for_all_roles_and_is_said_once(
    model_path, monkeypatch, capsys, speedup, dtype
):
    asked = []
    monkeypatch.setattr("verl.planning.placement.bf16_speedup", lambda *sizes: asked.append(sizes) or speedup)
    key = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fastest"
    config = make_config(model_path, "trainer.device=cpu", key)
    config = decide_machine_settings(config)
    for block in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic.model):
        assert block.fsdp_config.mixed_precision.param_dtype == dtype
    assert asked == [(16, 24)]
    assert capsys.readouterr().out.startswith(f"computing in {dtype}: ")


def test_a_run_that_goes_on_keeps_the_type_that_fastest_became(model_path, monkeypatch, capsys, tmp_path):
    key = "mixed_precision.param_dtype"
    settings = [f"actor_rollout_ref.actor.fsdp_config.{key}=fastest", f"trainer.default_local_dir={tmp_path}"]

    def placed(speedup: float, *more: str):
        monkeypatch.setattr("verl.planning.placement.bf16_speedup", lambda *sizes: speedup)
        config = decide_machine_settings(make_config(model_path, "trainer.device=cpu", *settings, *more))
        return config, get_value(config, f"actor_rollout_ref.ref.fsdp_config.{key}")

    config, dtype = placed(2.0)
    write_yaml(config, tmp_path / "config.yaml")
    assert dtype == "bf16" and placed(1.0)[1] == "fp32"  # no checkpoint yet: another machine decides anew
    RunState(step=3).save(CheckpointStore(tmp_path, None).begin(3))
    CheckpointStore(tmp_path, None).commit(3)
    capsys.readouterr()
    assert placed(1.0)[1] == "bf16"
    assert f"computing in bf16, as the run of {tmp_path}/global_step_3 did" in capsys.readouterr().out
    assert placed(1.0, "trainer.resume_mode=none")[1] == "fp32"


def test_the_speed_of_bf16_products_is_the_median_ratio_of_both_times(monkeypatch):
    ticks = iter([0, 3, 4, 10, 13, 14, 20, 90, 91])  # 3, 3 and 70 times as fast
    monkeypatch.setattr("verl.utils.device.time.thread_time", lambda: next(ticks))
    assert bf16_speedup(16, 16, rounds=3) == 3
