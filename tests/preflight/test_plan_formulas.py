"""Formulas of the memory plan against torch: what engines allocate, what autograd keeps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from known_models import NUM_PARAMETERS, SIZES, write_config, write_small
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from verl.preflight.engine_memory import FsdpLayout, MegatronLayout, layer_bytes, update_pass
from verl.preflight.plan import tokens_of
from verl.preflight.shapes import policy_shapes, value_shapes
from verl.utils.packed_attention import PACKED_ATTENTION
from verl.utils.packing import pack_rows
from verl.workers.engine.loading import PolicyModel, Precision
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.optim import build_optimizer
from verl.workers.megatron.settings import ParallelSizes

FP32 = Precision(torch.float32, torch.float32, torch.float32)
MIXED = Precision(torch.float32, torch.bfloat16, torch.float32)
BF16 = Precision(torch.bfloat16, torch.bfloat16, torch.float32)
OPTIM = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0, "momentum": 0.9, "adamw_lr": None}


@pytest.fixture
def small(tmp_path):
    folder = write_small(tmp_path)
    return SimpleNamespace(folder=folder, shapes=policy_shapes({"path": str(folder)}))


def hold(shapes, num_processes: int, precision, optimizer: str | None = None, **fsdp: object):
    """What one of so many FSDP processes holds."""
    settings = SimpleNamespace(**{"fsdp_size": -1, "reshard_after_forward": True} | fsdp)
    return FsdpLayout(num_processes, -1, 1).hold(shapes, precision, optimizer, settings, rank=0)


def bytes_of(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_one_processes_weights_gradients_and_optimizer_state_are_torchs_to_the_byte(name, precision, small):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small.folder), dtype=precision.model)
    matrices = [m.weight for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    optimizer = build_optimizer(model.parameters(), OPTIM | {"name": name}, matrices)
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    memory = hold(small.shapes, 1, precision, name)
    assert memory.weights == memory.gradients == bytes_of(model.parameters())
    assert memory.optimizer == bytes_of(state)


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_each_process_holds_the_largest_chunk_of_every_tensor(processes, small):
    expected = sum(
        max(len(chunk) for chunk in torch.empty(p.shape[0]).chunk(processes)) * p.numel // p.shape[0] * 4
        for p in small.shapes.parameters
    )
    assert hold(small.shapes, processes, FP32).weights == expected


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
    saved, alive = {}, []

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
def test_what_a_layer_keeps_for_backward_is_what_autograd_saves(precision, autocasts, qwen3, small):
    def per_token(layers: int) -> float:
        long, short = (
            kept_by_autograd(small.folder, layers, length, precision.model, autocasts, qwen3)
            for length in (96, 48)
        )
        return (long - short) / 96

    shapes = replace(small.shapes, dims=replace(small.shapes.dims, qk_norm=qwen3))
    measured = (per_token(4) - per_token(2)) / 2
    assert layer_bytes(shapes, precision, autocasts) == pytest.approx(measured, rel=0.06)


def test_checkpointing_keeps_each_layers_input_and_one_layer(small):
    held = hold(small.shapes, 1, FP32, "adamw")
    plain, _ = update_pass(held, FP32, tokens=100, checkpointing=False)
    saved, _ = update_pass(held, FP32, tokens=100, checkpointing=True)
    layer = layer_bytes(small.shapes, FP32, False)
    assert plain - saved == 100 * (3 * layer - 4 * 48 * 4)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MicroBatchLimits(4, None, False), 400),
        (MicroBatchLimits(40, None, False), 800),  # a process has 8 rows
        (MicroBatchLimits(None, 250, False), 250),
        (MicroBatchLimits(None, 50, False), 100),  # one trajectory may be longer than the budget
    ],
)
def test_tokens_of_a_pass_are_bounded_by_rows_budget_and_the_longest_trajectory(limits, expected):
    assert tokens_of(limits, 8, 100) == expected


def test_megatrons_stages_and_tensor_ranks_make_up_the_model(small):
    layout = MegatronLayout(8, ParallelSizes(tensor=2, pipeline=2), None)
    stages = [layout.shapes_of(small.shapes, stage) for stage in (0, 1)]
    assert [len(stage.layers) for stage in stages] == [2, 2]
    cut = {"q_proj.weight": (24, 48), "o_proj.weight": (48, 24), "q_proj.bias": (24,), "gate_proj": (40, 48)}
    for part, shape in cut.items():
        assert all(p.shape == shape for stage in stages for p in stage.parameters if part in p.name)
    whole = sum(p.numel for p in small.shapes.parameters if "norm" not in p.name)
    parts = sum(p.numel for stage in stages for p in stage.parameters if "norm" not in p.name)
    assert parts == pytest.approx(whole / 2, rel=1e-2)  # the vocabulary of 101 is padded
    assert [layout.position(rank) for rank in (0, 1, 2, 7)] == [
        "dp 0 tp 0 pp 0 cp 0",
        "dp 0 tp 1 pp 0 cp 0",
        "dp 1 tp 0 pp 0 cp 0",
        "dp 1 tp 1 pp 1 cp 0",
    ]


# -------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("size", ["3B", "7B", "72B"])
def test_counts_of_published_models_are_those_of_the_model_card(size, tmp_path):
    shapes = policy_shapes({"path": str(write_config(tmp_path, size))})
    assert shapes.num_parameters == NUM_PARAMETERS[size]
    assert len(shapes.layers) == SIZES[size]["num_hidden_layers"]


def test_a_critic_is_the_backbone_and_a_scalar_head(small):
    with torch.device("meta"):
        backbone = AutoModel.from_config(AutoConfig.from_pretrained(small.folder))
    expected = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    shapes = {p.name: p.shape for p in value_shapes({"path": str(small.folder)}).parameters}
    assert shapes == expected | {"value_head.weight": (1, 48), "value_head.bias": (1,)}


def test_adapters_alone_are_trained_with_lora(small):
    shapes = policy_shapes({"path": str(small.folder), "lora_rank": 4, "lora_alpha": 8})
    assert {p.name.rpartition("lora_")[2][:1] for p in shapes.parameters if p.trained} == {"A", "B"}
    assert shapes.num_parameters == small.shapes.num_parameters
    d, kv, i = 48, 24, 80
    per_layer = 4 * sum(a + b for a, b in ((d, d), (d, kv), (d, kv), (d, d), (d, i), (d, i), (i, d)))
    assert sum(p.numel for p in shapes.parameters if p.trained) == 4 * per_layer
