"""Formulas of the memory model against torch: what engines allocate, what autograd keeps."""

from types import SimpleNamespace

import pytest
import torch
from known_models import write_small
from transformers import AutoConfig, AutoModelForCausalLM

from verl.trainer.dry_run.items import Rows, tokens_of
from verl.trainer.dry_run.layout import MegatronLayout
from verl.trainer.dry_run.shapes import policy_shapes
from verl.trainer.dry_run.training import Spread, engine_memory, layer_bytes, update_pass
from verl.utils.attention import PACKED_ATTENTION
from verl.utils.packing import pack_rows
from verl.workers.engine.loading import PolicyModel
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.optim import build_optimizer
from verl.workers.engine.precision import Precision
from verl.workers.megatron.settings import ParallelSizes

FP32 = Precision(torch.float32, torch.float32, torch.float32)
MIXED = Precision(torch.float32, torch.bfloat16, torch.float32)
BF16 = Precision(torch.bfloat16, torch.bfloat16, torch.float32)
OPTIM = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0, "momentum": 0.9, "adamw_lr": None}


@pytest.fixture
def small(tmp_path):
    folder = write_small(tmp_path)
    return SimpleNamespace(folder=folder, shapes=policy_shapes({"path": str(folder)}))


def bytes_of(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_one_processes_weights_gradients_and_optimizer_state_are_torchs_to_the_byte(name, precision, small):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small.folder), dtype=precision.model)
    matrices = [m.weight for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    optimizer = build_optimizer(model.parameters(), OPTIM | {"name": name}, matrices)
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    memory = engine_memory(small.shapes, Spread.of(1, -1), precision, name)
    assert memory.weights == memory.gradients == bytes_of(model.parameters())
    assert memory.optimizer == bytes_of(state)


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_each_process_holds_the_largest_chunk_of_every_tensor(processes, small):
    expected = sum(
        max(len(chunk) for chunk in torch.empty(p.shape[0]).chunk(processes)) * p.numel // p.shape[0] * 4
        for p in small.shapes.parameters
    )
    assert engine_memory(small.shapes, Spread.of(processes, -1), FP32).weights == expected


def test_hybrid_sharding_holds_as_much_as_one_of_its_groups(small):
    hybrid = engine_memory(small.shapes, Spread.of(8, 2), FP32, "adamw")
    pair = engine_memory(small.shapes, Spread.of(2, -1), FP32, "adamw")
    assert (hybrid.weights, hybrid.gradients, hybrid.optimizer) == (
        pair.weights,
        pair.gradients,
        pair.optimizer,
    )


def test_without_resharding_all_layers_stay_gathered(small):
    kept = engine_memory(small.shapes, Spread.of(4, -1), MIXED, "adamw", reshards=False)
    numel = small.shapes.num_parameters
    assert kept.gathered == 2 * numel and kept.exchanged >= 4 * numel
    freed = engine_memory(small.shapes, Spread.of(4, -1), MIXED, "adamw")
    assert freed.gathered < kept.gathered and freed.exchanged < kept.exchanged


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

    dims = small.shapes.dims.__class__(48, 80, 48, 24, 101, qk_norm=qwen3)
    measured = (per_token(4) - per_token(2)) / 2
    assert layer_bytes(dims, precision, autocasts) == pytest.approx(measured, rel=0.06)


def test_checkpointing_keeps_each_layers_input_and_one_layer(small):
    plain = update_pass(small.shapes, FP32, False, tokens=100, checkpointing=False).activations
    saved = update_pass(small.shapes, FP32, False, tokens=100, checkpointing=True).activations
    layer = layer_bytes(small.shapes.dims, FP32, False)
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
    assert tokens_of(limits, Rows(per_process=8, longest=100)) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MicroBatchLimits(4, None, False), 200),  # rows are those of all that share them
        (MicroBatchLimits(None, 250, False), 250),  # the budget is of each
        (MicroBatchLimits(None, 1000, False), 400),
        (MicroBatchLimits(None, 30, False), 50),
    ],
)
def test_processes_that_share_a_pass_have_their_share_of_its_rows_and_a_budget_each(limits, expected):
    assert tokens_of(limits, Rows(per_process=8, longest=100), num_sharing=2) == expected


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
