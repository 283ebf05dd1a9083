"""Loading models: what fits is loaded whole, what does not is refused in words."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_training import CPU, make_config
from transformers import Cohere2Config, Cohere2ForCausalLM

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
    with pytest.raises(ValueError, match="have no weights or some of another shape"):
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
    block.model_dtype = name
    assert Precision.from_config(block, CPU) == Precision(dtype, torch.float32, torch.float32)
    block.mixed_precision.param_dtype = name
    assert Precision.from_config(block, CPU).compute == dtype
    assert load_policy({"path": model_path}, dtype).model.dtype == dtype
    block.model_dtype = "int8"
    with pytest.raises(ValueError, match="model_dtype: found 'int8'"):
        Precision.from_config(block, CPU)
