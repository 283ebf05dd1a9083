"""Shapes from a config.json alone are those of the model that training loads."""

import pytest
import torch
from known_models import NUM_PARAMETERS, SIZES, write_config, write_small
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from verl.trainer.dry_run.shapes import policy_shapes, value_shapes


def qwen_parameters(size: str) -> int:
    """By hand: embedding, head, last norm; each layer's q, k, v with biases, o, three MLP matrices, norms."""
    d, i, layers = (SIZES[size][key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    kv = d // SIZES[size]["num_attention_heads"] * SIZES[size]["num_key_value_heads"]
    layer = (d * d + d) + 2 * (d * kv + kv) + d * d + 3 * d * i + 2 * d
    return layers * layer + 2 * 152064 * d + d


@pytest.mark.parametrize("size", ["7B", "72B"])
def test_counts_of_published_models_follow_the_formula_and_the_model_card(size, tmp_path):
    shapes = policy_shapes({"path": str(write_config(tmp_path, size))})
    assert shapes.num_parameters == qwen_parameters(size) == NUM_PARAMETERS[size]
    assert len(shapes.layers) == SIZES[size]["num_hidden_layers"]
    assert sum(p.numel for p in shapes.root) == 2 * 152064 * shapes.dims.hidden + shapes.dims.hidden


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_the_models_on_the_meta_device(tied, tmp_path):
    block = {"path": str(write_small(tmp_path, tie_word_embeddings=tied))}
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        policy, backbone = AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)
    expected = {name: tuple(p.shape) for name, p in policy.named_parameters()}
    assert {p.name: p.shape for p in policy_shapes(block).parameters} == expected
    expected = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    found = {p.name: p.shape for p in value_shapes(block).parameters}
    assert found == expected | {"value_head.weight": (1, 48), "value_head.bias": (1,)}


def test_adapters_alone_are_trained_with_lora(tmp_path):
    block = {"path": str(write_small(tmp_path)), "lora_rank": 4, "lora_alpha": 8}
    shapes = policy_shapes(block)
    assert {p.name.rpartition("lora_")[2][:1] for p in shapes.parameters if p.trained} == {"A", "B"}
    assert shapes.num_parameters == policy_shapes(block, with_adapters=False).num_parameters
    d, kv, i = 48, 24, 80
    per_layer = 4 * sum(a + b for a, b in ((d, d), (d, kv), (d, kv), (d, d), (d, i), (d, i), (i, d)))
    assert sum(p.numel for p in shapes.parameters if p.trained) == 4 * per_layer


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        policy_shapes({"path": str(tmp_path)})
