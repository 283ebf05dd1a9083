"""Formulas of the memory plan against torch: what engines allocate, what autograd keeps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from known_models import NUM_PARAMETERS, SIZES, write_config, write_small
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from verl.config.policy import Optim
from verl.packing.attention import PACKED_ATTENTION
from verl.packing.packs import pack_rows
from verl.planning.memory_plan import tokens_of
from verl.planning.model_memory import Layout, held_memory, layer_bytes, size_of, update_pass
from verl.workers.engine.loading import PolicyModel, Precision
from verl.workers.engine.optim import build_optimizer
from verl.workers.engine.update_loop import MicroBatchLimits

FP32 = Precision(torch.float32, torch.float32)
MIXED = Precision(torch.float32, torch.bfloat16)
BF16 = Precision(torch.bfloat16, torch.bfloat16)
OPTIM = Optim(lr=1e-3, betas=[0.9, 0.99], weight_decay=0.0)
FSDP = SimpleNamespace(fsdp_size=-1, reshard_after_forward=True)


@pytest.fixture
def small(tmp_path):
    folder = write_small(tmp_path)
    return SimpleNamespace(folder=folder, size=size_of({"path": str(folder)}))


def bytes_of(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_weights_gradients_and_optimizer_state_are_torchs(precision, small):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small.folder), dtype=precision.model)
    optimizer = build_optimizer(model.parameters(), OPTIM, [])
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    memory = held_memory(small.size, Layout(1), 0, precision, True, FSDP)
    assert memory.weights == memory.gradients == bytes_of(model.parameters())
    assert memory.optimizer == pytest.approx(bytes_of(state), rel=2e-3)  # and a counter for each
    shared = held_memory(small.size, Layout(4), 0, precision, True, FSDP)
    assert shared.weights == -(-memory.weights // 4)


def kept_by_autograd(folder, num_layers: int, length: int, dtype, autocasts: bool, qwen3: bool) -> int:
    """Bytes of the tensors that a forward pass saves for backward, weights left out."""
    config = AutoConfig.from_pretrained(folder)
    if qwen3:
        from transformers import Qwen3Config

        config = Qwen3Config(**{k: getattr(config, k) for k in FIELDS}, head_dim=12)
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    config._attn_implementation = PACKED_ATTENTION
    model = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=dtype).train())
    batch = {
        "input_ids": torch.randint(0, 101, (2, length)),
        "attention_mask": torch.ones(2, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(2, length),
        "response_mask": torch.ones(2, length - 1, dtype=torch.bool),
    }
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}
    alive = []

    def keep(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocasts),
    ):
        model(pack_rows(batch, [0, 1], "cpu"), 1.0, True)
    return sum(saved.values())


FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


@pytest.mark.parametrize("qwen3", [False, True])
@pytest.mark.parametrize(
    ("precision", "autocasts"),
    [(FP32, False), (BF16, False), (MIXED, True)],
    ids=["fp32", "bf16", "autocast"],
)
def test_what_a_layer_keeps_for_backward_is_what_autograd_saves(
    precision, autocasts, qwen3, small, monkeypatch
):
    # as on CUDA; on a CPU in bf16 `causal_attention` keeps the probabilities besides
    monkeypatch.setattr("verl.packing.attention.is_worth_it", lambda query, num_keys: False)

    def per_token(layers: int) -> float:
        long, short = (
            kept_by_autograd(small.folder, layers, length, precision.model, autocasts, qwen3)
            for length in (96, 48)
        )
        return (long - short) / 96

    measured = (per_token(4) - per_token(2)) / 2
    assert layer_bytes(replace(small.size, qk_norm=qwen3), precision, autocasts) == pytest.approx(
        measured, rel=0.06
    )


def test_checkpointing_keeps_each_layers_input_and_one_layer(small):
    held = held_memory(small.size, Layout(1), 0, FP32, True, FSDP)
    plain, _ = update_pass(small.size, held, FP32, tokens=100, checkpointing=False)
    saved, _ = update_pass(small.size, held, FP32, tokens=100, checkpointing=True)
    layer = layer_bytes(small.size, FP32, False)
    assert plain - saved == 100 * (3 * layer - 4 * 48 * 4)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MicroBatchLimits(4, None, False), 400),
        (MicroBatchLimits(40, None, False), 800),  # a process has 8 rows
        (MicroBatchLimits(None, 250, False), 250),
        (MicroBatchLimits(None, 50, False), 100),  # one trajectory may be longer than the budget
        (MicroBatchLimits(None, None, False, 300), 500),  # on CPU: and twice what trajectories may share
        (MicroBatchLimits(2, None, False, 300), 200),
        (MicroBatchLimits(None, 400, False, 300), 400),
        (MicroBatchLimits(None, None, False, 500), 500),  # too short a beginning
        (MicroBatchLimits(None, None, True, 300), 300),  # padded rows share nothing
        (MicroBatchLimits(None, None, True, 50), 100),
    ],
)
def test_tokens_of_a_pass_are_bounded_by_rows_budget_and_the_longest_trajectory(limits, expected):
    assert tokens_of(limits, 8, 100) == expected


def test_megatrons_stages_and_tensor_ranks_make_up_the_model(small):
    layout = Layout(8, True, tensor=2, pipeline=2)
    stages = [held_memory(small.size, layout, stage, FP32, True, FSDP) for stage in (0, 1)]
    assert 2 * sum(stage.weights for stage in stages) == 4 * small.size.num_parameters
    assert [stage.num_layers for stage in stages] == [2, 2]
    assert [stage.has_head for stage in stages] == [False, True]
    assert all(stage.optimizer == stage.weights for stage in stages)  # two moments, over two replicas


@pytest.mark.parametrize("size", ["3B", "7B", "72B"])
def test_counts_of_published_models_are_those_of_the_model_card(size, tmp_path):
    counted = size_of({"path": str(write_config(tmp_path, size))})
    assert counted.num_parameters == NUM_PARAMETERS[size]
    assert counted.num_layers == SIZES[size]["num_hidden_layers"]
    assert counted.ties_embeddings == (size == "3B")


def test_a_critic_is_the_backbone_and_a_scalar_head(small):
    with torch.device("meta"):
        backbone = AutoModel.from_config(AutoConfig.from_pretrained(small.folder))
    expected = sum(p.numel() for p in backbone.parameters()) + 48 + 1
    assert size_of({"path": str(small.folder)}, is_critic=True).num_parameters == expected


def test_adapters_alone_are_trained_with_lora(small):
    size = size_of({"path": str(small.folder), "lora_rank": 4, "lora_alpha": 8})
    assert (
        size.num_parameters == small.size.num_parameters
        and size.layer_parameters == small.size.layer_parameters
    )
    d = 48
    kv = 24
    i = 80
    per_layer = 4 * sum(a + b for a, b in ((d, d), (d, kv), (d, kv), (d, d), (d, i), (d, i), (i, d)))
    assert size.trained == size.adapters == 4 * per_layer
