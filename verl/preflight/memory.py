"""Memory of one model in one process: over FSDP2 or Megatron, trained or frozen.

    config.json -> ModelSize: counts of parameters, widths
    ModelSize, Layout, Precision -> Held: what a process holds of the model, and what a pass gathers
    Held, tokens of a pass -> activations, the chunk of logits under way

Everything is in bytes. What a pass takes is counted from what autograd keeps, op by op; it is an upper bound
where rows share a beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from verl.config import Config
from verl.trainer.placement import num_processes as num_processes_of
from verl.utils.linear_logprob import chunk_rows_of
from verl.workers.engine.loading import Precision, load_hf_config
from verl.workers.engine.lora import adapter_config, add_adapters, wants_adapters
from verl.workers.megatron.settings import ParallelSizes

PREFETCHED_UNITS = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters, and its widths (hidden ... vocab)."""

    num_parameters: int  # all but adapters, tied ones once
    num_layers: int
    layer: int  # parameters in one decoder layer
    adapters: int  # parameters that LoRA trains (0: the model itself is trained)
    hidden: int
    intermediate: int  # of all experts that a token takes
    heads: int
    queries: int
    keys: int
    key_heads: int
    vocab: int
    qk_norm: bool  # queries and keys are normed
    has_vocab_head: bool  # hidden states become log-probs, not values
    ties_embeddings: bool  # the output matrix is the embedding's
    stored: torch.dtype | None = None  # of the weights in their files, as config.json says

    @property
    def trained(self) -> int:
        return self.adapters or self.num_parameters

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """What is in no layer."""
        return self.num_parameters - self.num_layers * self.layer


def size_of(model: Mapping[str, Any], is_critic: bool = False, with_adapters: bool = True) -> ModelSize:
    """Of the model that a block such as `actor_rollout_ref.model` describes. ValueError: it can't be read.

    The class that training loads is made on torch's meta device (no memory, no weights).
    """
    config = load_hf_config(model)
    auto_class = AutoModel if is_critic else AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=model.get("trust_remote_code", False))
    if with_adapters and wants_adapters(model):
        add_adapters(skeleton, adapter_config(model), str(model["path"]))
    counts = {name: p.numel() for name, p in skeleton.named_parameters()}
    adapters = sum(count for name, count in counts.items() if ".lora_" in name)
    layer_classes = set(skeleton._no_split_modules or ())
    layers = [name for name, module in skeleton.named_modules() if type(module).__name__ in layer_classes]
    inside = tuple(f"{name}." for name in layers)
    in_layers = sum(n for name, n in counts.items() if name.startswith(inside) and ".lora_" not in name)
    fields = config.get_text_config().to_dict()
    hidden = fields["hidden_size"]
    heads = fields["num_attention_heads"]
    value_head = (hidden + 1) * is_critic
    head_dim = fields.get("head_dim") or hidden // heads
    intermediate = fields.get("intermediate_size") or 4 * hidden
    if fields.get("num_experts_per_tok"):
        intermediate = fields["num_experts_per_tok"] * (fields.get("moe_intermediate_size") or intermediate)
    return ModelSize(
        num_parameters=sum(counts.values()) - adapters + value_head,
        num_layers=len(layers),
        layer=in_layers // max(1, len(layers)),
        adapters=adapters + value_head if adapters else 0,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        queries=heads * head_dim,
        keys=(fields.get("num_key_value_heads") or heads) * head_dim,
        key_heads=fields.get("num_key_value_heads") or heads,
        vocab=fields["vocab_size"],
        qk_norm=fields["model_type"].startswith(("qwen3", "gemma3")),
        has_vocab_head=not is_critic,
        ties_embeddings=not is_critic and not any("lm_head" in name for name in counts),
        stored=dtype if isinstance(dtype := config.get_text_config().dtype, torch.dtype) else None,
    )


@dataclass(frozen=True)
class Layout:
    """How models lie over the processes. context: processes that share the tokens of each sequence."""

    num_processes: int
    is_megatron: bool = False
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @classmethod
    def of(cls, config: Config) -> Layout:
        """ValueError: the processes can't be dealt out."""
        actor = config.actor_rollout_ref.actor
        num_processes = num_processes_of(config)
        if actor.strategy != "megatron":
            return cls(num_processes, context=actor.ulysses_sequence_parallel_size)
        block = actor.megatron
        tensor = block.tensor_model_parallel_size
        pipeline = block.pipeline_model_parallel_size
        ParallelSizes(tensor, pipeline, block.context_parallel_size).check(num_processes)
        return cls(num_processes, True, tensor, pipeline, block.context_parallel_size)

    @property
    def replicas(self) -> int:
        """Of the model, that take different trajectories."""
        return self.num_processes // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        if not self.is_megatron:
            return f"FSDP2, {self.context} for each sequence" if self.context > 1 else "FSDP2"
        sizes = f"tensor {self.tensor}, pipeline {self.pipeline}, context {self.context}"
        return f"Megatron, {sizes}, data {self.replicas}"


@dataclass(frozen=True)
class Held:
    """What one process has of a model; weights, gradients and optimizer are bytes that it keeps."""

    weights: int
    gradients: int
    optimizer: int
    num_layers: int
    has_head: bool  # it computes log-probs
    gathered: int = 0  # whole weights that a pass works with, beyond those it keeps
    exchanged: int = 0  # gradients on their way between processes in a backward pass
    waiting: int = 0  # gradients that no process has given away before the last micro-batch
    kept: int = 0  # the last sum over processes: FSDP2 frees it in the next micro-batch
    gathered_root: int = 0  # of `gathered`, what is in no layer
    autocasts: bool = False  # computes in 16 bits beside a residual stream in float32
    in_flight: int = 1  # micro-batches whose activations it keeps at once
    tensor: int = 1  # processes that share the width of each layer
    keeps_gradients: bool = False  # their buffers stay between updates (optimizer_offload frees them)
    before_a_step: int = 0  # copy of the trained weights from before a step (actor.max_step_kl)


def hold(
    size: ModelSize, layout: Layout, stage: int, precision: Precision, is_trained: bool, fsdp: Any
) -> Held:
    """What a process of a pipeline's stage holds. fsdp: the block `fsdp_config`."""
    compute = precision.compute.itemsize
    reduce = torch.float32.itemsize
    if layout.is_megatron:
        return _hold_on_megatron(size, layout, stage, compute, reduce, is_trained)
    trained = size.trained * is_trained
    alone = layout.num_processes == 1
    casts = precision.compute != precision.model
    shard = fsdp.fsdp_size if 0 < fsdp.fsdp_size < layout.num_processes else layout.num_processes
    width = 4 if size.adapters else precision.model.itemsize
    if alone:  # autocast keeps the matrices that it has cast until the pass ends
        gathered = compute * casts * size.num_parameters
        exchanged = 0
        waiting = 0
    else:
        at_work = size.root + PREFETCHED_UNITS * size.layer
        gathered = compute * (at_work if fsdp.reshard_after_forward else size.num_parameters)
        # a unit's whole gradient, and the buffer that it is summed over processes in; without resharding the
        # gradients of all units wait for the last micro-batch (those of adapters always do)
        unit = size.adapters // size.num_layers if size.adapters else max(size.layer, size.root)
        exchanged = unit * (compute + reduce) * is_trained
        waiting = trained * reduce * (not fsdp.reshard_after_forward or size.adapters > 0)
    return Held(
        weights=-(-(size.num_parameters * precision.model.itemsize + 4 * size.adapters) // shard),
        gradients=-(-trained * width // shard),
        optimizer=-(-trained * 2 * width // shard),  # AdamW's two moments
        num_layers=size.num_layers,
        has_head=size.has_vocab_head,
        gathered=gathered,
        exchanged=exchanged,
        waiting=waiting,
        kept=0 if alone or waiting or not is_trained else reduce * size.root,
        gathered_root=0 if alone else compute * size.root,
        autocasts=compute == 2,
        before_a_step=-(-trained * width // shard),
    )


def _hold_on_megatron(
    size: ModelSize, layout: Layout, stage: int, compute: int, reduce: int, is_trained: bool
) -> Held:
    """Weights have the type of the computation; the distributed optimizer's float32 state (and weights, if
    those are of 16 bits) is dealt out over the processes that hold the same part.
    """
    layers = size.num_layers // layout.pipeline
    is_last = stage == layout.pipeline - 1
    here = layers * size.layer + size.embedding * (stage == 0)
    here += (size.root - size.embedding) * is_last
    here += size.embedding * (is_last and stage > 0 and size.ties_embeddings)
    here = -(-here // layout.tensor)
    own_shard = -(-here // (layout.replicas * layout.context))
    return Held(
        weights=here * compute,
        gradients=(4 if reduce == 4 else compute) * here * is_trained,
        optimizer=own_shard * (12 if compute < 4 else 8) * is_trained,
        num_layers=layers,
        has_head=size.has_vocab_head and is_last,
        in_flight=layout.pipeline - stage,
        tensor=layout.tensor,
        keeps_gradients=is_trained,
        before_a_step=own_shard * 4 * is_trained,
    )


def update_pass(
    size: ModelSize,
    held: Held,
    precision: Precision,
    tokens: int,
    checkpointing: bool,
    compiles: bool = False,
) -> tuple[int, int]:
    """(activations, chunk of logits) of a forward and backward pass over `tokens` loss tokens.

    With checkpointing each layer keeps its input alone, and one layer at a time is computed again.
    """
    layer = layer_bytes(size, precision, held.autocasts, held.tensor, compiles)
    residual = size.hidden * (4 if held.autocasts else precision.compute.itemsize)
    kept, again = (residual, layer) if checkpointing else (layer, 0)
    ends = 5 * residual  # embedding, last norm, hidden states of the loss tokens and their gradient
    activations = tokens * (held.in_flight * held.num_layers * kept + again + ends)
    return activations, _head(size, held, precision, tokens, True, compiles)


def forward_pass(
    size: ModelSize, held: Held, precision: Precision, tokens: int, compiles: bool = False
) -> tuple[int, int]:
    """(activations, chunk of logits) of a pass without gradient: one layer's results at a time."""
    widest = max(3 * size.intermediate, 3 * size.queries + 2 * size.keys) // held.tensor
    activations = tokens * (precision.compute.itemsize * (widest + 3 * size.hidden) + 8 * size.hidden)
    return activations, _head(size, held, precision, tokens, False, compiles)


def layer_bytes(
    size: ModelSize, precision: Precision, autocasts: bool, tensor: int = 1, compiles: bool = False
) -> int:
    """What autograd keeps of one decoder layer for each token.

    Norms keep their input and its normalised form in float32 and their output as often as a product reads
    it; attention queries, keys, values and its output twice; the MLP both halves, the activation and the
    product. Compiled norms keep their input and their output once, the MLP no activation.
    """
    itemsize = precision.compute.itemsize
    if itemsize == 4:
        norms = 24
        head_norm = 8
    else:
        norms = 26 if autocasts else 16
        head_norm = 6
    if compiles:
        norms = 2 * ((4 if autocasts else itemsize) + itemsize)
    wide = itemsize * (3 * size.queries + 2 * size.keys + (3 if compiles else 4) * size.intermediate)
    wide += head_norm * (size.queries + size.keys) * size.qk_norm
    return norms * size.hidden + wide // tensor


def _head(
    size: ModelSize, held: Held, precision: Precision, tokens: int, backward: bool, compiles: bool
) -> int:
    """Logits of one chunk in float32 and what is computed from them; the gradient of the output matrix, in
    float32 and in its own type.
    """
    if not held.has_head:
        return 0
    vocab = -(-size.vocab // held.tensor)
    itemsize = precision.compute.itemsize
    rows = min(tokens, chunk_rows_of(vocab, True))
    own_type = itemsize if itemsize < 4 else 0
    each = 12 + own_type * (1 + backward)  # logits, log-probs, probabilities; the product, its gradient
    if compiles:  # logits and their gradient alone
        each = itemsize * (1 + backward)
    chunk = rows * vocab * each
    return chunk + vocab * size.hidden * (4 + own_type) * (backward and not size.adapters)
