"""What one rank does in tests of models on Megatron; run by `ranks.run_ranks`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from tiny_training import make_batch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl.packing.packs import pack_rows

SIZES = {
    "vocab_size": 41,  # no multiple of 2: the last tensor rank's part is padded
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3 untied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, tie_word_embeddings=False, rope_parameters=YARN)
    ),
    "llama3 tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
}


def write_models(root: Path) -> dict[str, str]:
    """name -> folder of a random model, biases and norms random as well."""
    folders = {}
    for seed, (name, build) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = build()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
        folders[name] = str(root / name.replace(" ", "_"))
        model.save_pretrained(folders[name])
    return folders


@dataclass(frozen=True)
class Layout:
    """One way of cutting a model over 4 processes."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    recompute: bool = False


@dataclass(frozen=True)
class Case:
    """A model of MODELS, cut one way."""

    model: str
    layout: Layout
    is_policy: bool = True
    fuses: bool = False  # as on CUDA; what would be compiled there runs as it is


ASKED = {"temperature": 0.7, "with_entropy": True, "with_sum_pi_squared": True}  # of a policy


def micro_batches() -> list:
    """Four packs of rows; in each two rows begin alike, so that they share."""
    batch = make_batch(12, seed=1).batch
    batch["input_ids"][1::3, :12] = batch["input_ids"][::3, :12]
    batch["attention_mask"][1::3] = batch["attention_mask"][::3]
    batch["response_mask"][1::3] = batch["response_mask"][::3]
    batch["position_ids"][1::3] = batch["position_ids"][::3]
    return [pack_rows(batch, range(start, start + 3), "cpu") for start in range(0, 12, 3)]


def share_of_loss(outputs):
    """What a micro-batch adds to a loss that depends on every output differently."""
    weights = torch.linspace(-1.0, 2.0, len(outputs[0]))
    return (outputs[0] * weights + outputs[0].square()).sum() + 0.3 * sum(
        (x * weights).sum() for x in outputs[1:2]
    )


@dataclass
class Result:
    """Of a case, on one rank. outputs: of each micro-batch, on the last stage."""

    replica: int
    outputs: list = field(default_factory=list)
    gradients: Mapping = field(default_factory=dict)
    weights: Mapping = field(default_factory=dict)


def run_case(folder, case):
    """Forward and backward passes of all micro-batches by Megatron's own schedule and reductions; gradients
    and weights under Hugging Face's names.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from verl.workers.megatron.model import build_model
    from verl.workers.megatron.settings import ParallelSizes

    layout = case.layout
    sizes = ParallelSizes(layout.tensor, layout.pipeline, layout.context)
    with patch("verl.workers.megatron.model._compiles", lambda *_: case.fuses):
        built = build_model(
            {"path": folder, "enable_gradient_checkpointing": layout.recompute},
            sizes,
            torch.device("cpu"),
            torch.float32,
            case.is_policy,
        )
    assert built.config.bias_activation_fusion == case.fuses
    replica = mpu.get_data_parallel_rank()
    num_replicas = mpu.get_data_parallel_world_size()
    result = Result(replica)
    parts = micro_batches()[replica::num_replicas]

    def loss_of(part, outputs):
        result.outputs.append([output.detach().clone() for output in outputs])
        return share_of_loss(outputs), torch.tensor(0), {}

    def forward_step(data, model):
        part = next(data)
        return model(part, **(ASKED if case.is_policy else {})), partial(loss_of, part)

    built.config.finalize_model_grads_func = finalize_model_grads
    trained = DistributedDataParallel(
        built.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), built.stage
    )
    trained.zero_grad_buffer()
    get_forward_backward_func(layout.pipeline)(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=trained,
        num_microbatches=len(parts),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    whole = partial(built.weights.whole_tensors, dtype=torch.float32, device=torch.device("cpu"))
    result.gradients = {
        name: tensor.clone() for name, tensor in whole(lambda name: built.parameter(name).main_grad)
    }
    result.weights = {name: tensor.clone() for name, tensor in whole(built.parameter)}
    assert list(result.weights) == list(built.weights.shapes())
    return result


def run_cases(rank, world_size, out, folders, cases):
    """Runs each case (name -> Case); writes what this rank found."""
    from verl.workers.megatron import parallel_state

    results = {}
    for name, case in cases.items():
        with torch.compiler.set_stance("force_eager"):
            results[name] = run_case(folders[case.model], case)
        parallel_state.destroy()
    torch.save(results, out / f"rank{rank}.pt")
