"""How a model may be cut, and what is refused before anything is read; without Megatron."""

import importlib.util

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verl.workers.megatron import check_installed
from verl.workers.megatron.settings import ModelShape, ParallelSizes

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MistralConfig(**SIZES), "found model_type 'mistral', expected one of qwen2, qwen3, llama"),
        (Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=2), "use_sliding_window=True"),
        (Qwen3Config(**SIZES, layer_types=["sliding_attention"] * 8), "layer_types="),
        (Qwen3Config(**SIZES, attention_bias=True), "attention_bias=True"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act='gelu'"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type .dynamic. .* expected one of default, linear, llama3, yarn",
        ),
    ],
)
def test_what_is_not_built_here_is_refused_by_name(config, said):
    with pytest.raises(ValueError, match=said):
        ModelShape.of(config)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ParallelSizes(tensor=8), "4 key and value heads, which tensor_model_parallel_size=8"),
        (ParallelSizes(tensor=3), "8 attention heads, which tensor_model_parallel_size=3"),
        (ParallelSizes(tensor=4, context=4), "2 attention heads on each tensor rank, which context_par"),
        (ParallelSizes(pipeline=3), "8 layers, which pipeline_model_parallel_size=3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.of(Qwen2Config(**SIZES)).check(sizes)


def test_a_replica_has_to_divide_the_processes():
    ParallelSizes(2, 2, 1).check(8)
    with pytest.raises(ValueError, match="4 processes for one replica .* but there are 6 in all"):
        ParallelSizes(2, 2, 1).check(6)


def test_a_missing_package_is_said_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'run `pip install -c constraints.txt -e "\.\[megatron\]"`'):
        check_installed()
