"""The memory of one model in one process, over FSDP2 or Megatron, trained or frozen.

    config.json -> ModelSize: counts of parameters, widths
    ModelSize, Layout, Precision -> Held: what a process holds of the model, and what a pass gathers
    Held, tokens of a pass -> activations, the chunk of logits under way

Everything is in bytes. The memory of a pass is counted from what autograd keeps, op by op. It is an upper
bound if rows share a beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from verl.config import Config
from verl.packing.linear_logprob import chunk_rows_of
from verl.planning.placement import num_processes as num_processes_of
from verl.workers.engine.loading import Precision, load_hf_config
from verl.workers.engine.lora import adapter_config, add_adapters, wants_adapters
from verl.workers.megatron.settings import ParallelSizes

PREFETCHED_UNITS = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class ModelSize:
    """The counts of a model's parameters, and its widths.

    Attributes:
        num_parameters: The number of parameters without adapters, with tied ones counted once.
        num_layers: The number of decoder layers.
        layer_parameters: The number of parameters in one decoder layer.
        adapters: The number of parameters that LoRA trains. 0 if the model itself is trained.
        hidden: The width of the hidden states.
        intermediate: The width of the MLP, or of all experts together that a token takes.
        heads: The number of attention heads.
        query_width: The width of the queries of all heads.
        key_width: The width of the keys of all heads.
        key_heads: The number of heads with keys of their own.
        vocab: The size of the vocabulary.
        qk_norm: Whether queries and keys are normed.
        has_vocab_head: Whether hidden states become log-probs. Otherwise they become values.
        ties_embeddings: Whether the output matrix is the embedding's.
    """

    num_parameters: int
    num_layers: int
    layer_parameters: int
    adapters: int
    hidden: int
    intermediate: int
    heads: int
    query_width: int
    key_width: int
    key_heads: int
    vocab: int
    qk_norm: bool
    has_vocab_head: bool
    ties_embeddings: bool

    @property
    def trained(self) -> int:
        return self.adapters or self.num_parameters

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Return the number of parameters that are in no decoder layer."""
        return self.num_parameters - self.num_layers * self.layer_parameters


def size_of(model: Mapping[str, Any], is_critic: bool = False, with_adapters: bool = True) -> ModelSize:
    """Return the size of the model that a block such as `actor_rollout_ref.model` describes.

    The class that training loads is made on torch's meta device, without memory and weights.

    Args:
        model: The block.
        is_critic: Whether the model is a critic, which has a head for values.
        with_adapters: Whether to count the adapters that the block asks for.

    Raises:
        ValueError: If the model can't be read.
    """
    config = load_hf_config(model)
    auto_class = AutoModel if is_critic else AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=model.get("trust_remote_code", False))
    if with_adapters and wants_adapters(model):
        add_adapters(skeleton, adapter_config(model), str(model["path"]))
    counts = {name: parameter.numel() for name, parameter in skeleton.named_parameters()}
    adapters = sum(count for name, count in counts.items() if ".lora_" in name)
    layer_classes = set(skeleton._no_split_modules or ())
    layers = [name for name, module in skeleton.named_modules() if type(module).__name__ in layer_classes]
    layer_prefixes = tuple(f"{name}." for name in layers)
    in_layers = sum(
        count for name, count in counts.items() if name.startswith(layer_prefixes) and ".lora_" not in name
    )
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
        layer_parameters=in_layers // max(1, len(layers)),
        adapters=adapters + value_head if adapters else 0,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        query_width=heads * head_dim,
        key_width=(fields.get("num_key_value_heads") or heads) * head_dim,
        key_heads=fields.get("num_key_value_heads") or heads,
        vocab=fields["vocab_size"],
        qk_norm=fields["model_type"].startswith(("qwen3", "gemma3")),
        has_vocab_head=not is_critic,
        ties_embeddings=not is_critic and not any("lm_head" in name for name in counts),
    )


@dataclass(frozen=True)
class Layout:
    """The layout of models over the processes.

    Attributes:
        num_processes: The number of processes.
        is_megatron: Whether the models lie over Megatron, and not FSDP2.
        tensor: The number of processes that share the width of each layer.
        pipeline: The number of pipeline stages.
        context: The number of processes that share the tokens of each sequence.
    """

    num_processes: int
    is_megatron: bool = False
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @classmethod
    def of(cls, config: Config) -> Layout:
        """Return the layout of a configuration.

        Raises ValueError if the processes can't be dealt out.
        """
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
        """Return the number of replicas of the model, which take different trajectories."""
        return self.num_processes // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        if not self.is_megatron:
            return f"FSDP2, {self.context} for each sequence" if self.context > 1 else "FSDP2"
        sizes = f"tensor {self.tensor}, pipeline {self.pipeline}, context {self.context}"
        return f"Megatron, {sizes}, data {self.replicas}"


@dataclass(frozen=True)
class Held:
    """The memory that one process holds of a model.

    All sizes are in bytes.

    Attributes:
        weights: The weights that it keeps.
        gradients: The gradients that it keeps.
        optimizer: The state of the optimizer that it keeps.
        num_layers: The number of layers that it holds.
        has_head: Whether it computes log-probs.
        gathered: The whole weights with which a pass works, beyond those that it keeps.
        exchanged: The gradients on their way between processes in a backward pass.
        unreduced_gradients: The gradients that no process has given away before the last micro-batch.
        autocasts: Whether it computes in 16 bits beside a residual stream in float32.
        in_flight: The number of micro-batches whose activations it keeps at once.
        tensor: The number of processes that share the width of each layer.
        keeps_gradients: Whether the buffers of gradients stay between updates (optimizer_offload frees them).
        before_a_step: The copy of the trained weights from before a step (actor.max_step_kl).
    """

    weights: int
    gradients: int
    optimizer: int
    num_layers: int
    has_head: bool
    gathered: int = 0
    exchanged: int = 0
    unreduced_gradients: int = 0
    autocasts: bool = False
    in_flight: int = 1
    tensor: int = 1
    keeps_gradients: bool = False
    before_a_step: int = 0


def held_memory(
    size: ModelSize, layout: Layout, stage: int, precision: Precision, is_trained: bool, fsdp: Any
) -> Held:
    """Return what a process of a pipeline's stage holds of a model.

    Args:
        size: The size of the model.
        layout: The layout of the models over the processes.
        stage: The stage of the pipeline.
        precision: The types of weights and computation.
        is_trained: Whether the model is trained.
        fsdp: The block `fsdp_config`.
    """
    compute = precision.compute.itemsize
    reduce = torch.float32.itemsize
    if layout.is_megatron:
        return _held_memory_on_megatron(size, layout, stage, compute, reduce, is_trained)
    trained = size.trained * is_trained
    alone = layout.num_processes == 1
    casts = precision.compute != precision.model
    shard = fsdp.fsdp_size if 0 < fsdp.fsdp_size < layout.num_processes else layout.num_processes
    width = 4 if size.adapters else precision.model.itemsize
    if alone:  # Autocast keeps the matrices that it has cast until the pass ends.
        gathered = compute * casts * size.num_parameters
        exchanged = 0
        unreduced_gradients = 0
    else:
        at_work = size.root + PREFETCHED_UNITS * size.layer_parameters
        gathered = compute * (at_work if fsdp.reshard_after_forward else size.num_parameters)
        # `exchanged` is a unit's whole gradient, and the buffer in which it is summed over processes. Without
        # resharding the gradients of all units wait for the last micro-batch. Those of adapters always do.
        unit = size.adapters // size.num_layers if size.adapters else max(size.layer_parameters, size.root)
        exchanged = unit * (compute + reduce) * is_trained
        unreduced_gradients = trained * reduce * (not fsdp.reshard_after_forward or size.adapters > 0)
    return Held(
        weights=-(-(size.num_parameters * precision.model.itemsize + 4 * size.adapters) // shard),
        gradients=-(-trained * width // shard),
        optimizer=-(-trained * 2 * width // shard),  # AdamW's two moments
        num_layers=size.num_layers,
        has_head=size.has_vocab_head,
        gathered=gathered,
        exchanged=exchanged,
        unreduced_gradients=unreduced_gradients,
        autocasts=compute == 2,
        before_a_step=-(-trained * width // shard),
    )


def _held_memory_on_megatron(
    size: ModelSize, layout: Layout, stage: int, compute: int, reduce: int, is_trained: bool
) -> Held:
    """Return what a process of a pipeline's stage holds of a model on Megatron.

    Weights have the type of the computation. The float32 state of the distributed optimizer is dealt out over
    the processes that hold the same part of the model. So are its float32 weights, which it has if the
    weights are of 16 bits.
    """
    layers = size.num_layers // layout.pipeline
    is_last = stage == layout.pipeline - 1
    num_parameters = layers * size.layer_parameters + size.embedding * (stage == 0)
    num_parameters += (size.root - size.embedding) * is_last
    num_parameters += size.embedding * (is_last and stage > 0 and size.ties_embeddings)
    num_parameters = -(-num_parameters // layout.tensor)
    num_in_shard = -(-num_parameters // (layout.replicas * layout.context))
    return Held(
        weights=num_parameters * compute,
        gradients=(4 if reduce == 4 else compute) * num_parameters * is_trained,
        optimizer=num_in_shard * (12 if compute < 4 else 8) * is_trained,
        num_layers=layers,
        has_head=size.has_vocab_head and is_last,
        in_flight=layout.pipeline - stage,
        tensor=layout.tensor,
        keeps_gradients=is_trained,
        before_a_step=num_in_shard * 4 * is_trained,
    )


def update_pass(
    size: ModelSize,
    held: Held,
    precision: Precision,
    tokens: int,
    checkpointing: bool,
    compiles: bool = False,
) -> tuple[int, int]:
    """Return the bytes of a forward and backward pass over `tokens` loss tokens.

    With checkpointing each layer keeps its input alone, and one layer at a time is computed again.

    Args:
        size: The size of the model.
        held: What the process holds of the model.
        precision: The types of weights and computation.
        tokens: The number of loss tokens.
        checkpointing: Whether activations are computed again in the backward pass.
        compiles: Whether norms and MLPs are compiled.

    Returns:
        The bytes of the activations, and of the chunk of logits.
    """
    layer = layer_bytes(size, precision, held.autocasts, held.tensor, compiles)
    residual = size.hidden * (4 if held.autocasts else precision.compute.itemsize)
    kept_bytes, recomputed_bytes = (residual, layer) if checkpointing else (layer, 0)
    ends = 5 * residual  # the embedding, the last norm, hidden states of the loss tokens and their gradient
    activations = tokens * (held.in_flight * held.num_layers * kept_bytes + recomputed_bytes + ends)
    return activations, _head_bytes(size, held, precision, tokens, True, compiles)


def forward_pass(
    size: ModelSize, held: Held, precision: Precision, tokens: int, compiles: bool = False
) -> tuple[int, int]:
    """Return the bytes of the activations and of the chunk of logits in a pass without gradient.

    Such a pass holds the results of one layer at a time.
    """
    widest = max(3 * size.intermediate, 3 * size.query_width + 2 * size.key_width) // held.tensor
    activations = tokens * (precision.compute.itemsize * (widest + 3 * size.hidden) + 8 * size.hidden)
    return activations, _head_bytes(size, held, precision, tokens, False, compiles)


def layer_bytes(
    size: ModelSize, precision: Precision, autocasts: bool, tensor: int = 1, compiles: bool = False
) -> int:
    """Return the bytes that autograd keeps of one decoder layer for each token.

    Norms keep their input and its normalised form in float32, and their output as often as a product reads
    it. Attention keeps queries, keys and values, and its output twice. The MLP keeps both halves, the
    activation and the product. Compiled norms keep their input and their output once, and a compiled MLP
    keeps no activation.
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
    wide = itemsize * (3 * size.query_width + 2 * size.key_width + (3 if compiles else 4) * size.intermediate)
    wide += head_norm * (size.query_width + size.key_width) * size.qk_norm
    return norms * size.hidden + wide // tensor


def _head_bytes(
    size: ModelSize, held: Held, precision: Precision, tokens: int, backward: bool, compiles: bool
) -> int:
    """Return the bytes of the output head in a pass.

    They are the logits of one chunk in float32 and what is computed from them, and the gradient of the output
    matrix in float32 and in its own type.
    """
    if not held.has_head:
        return 0
    vocab = -(-size.vocab // held.tensor)
    itemsize = precision.compute.itemsize
    rows = min(tokens, chunk_rows_of(vocab, True))
    own_type = itemsize if itemsize < 4 else 0
    # Logits, log-probs and probabilities, the product, and its gradient.
    bytes_per_logit = 12 + own_type * (1 + backward)
    if compiles:  # only the logits and their gradient
        bytes_per_logit = itemsize * (1 + backward)
    chunk = rows * vocab * bytes_per_logit
    return chunk + vocab * size.hidden * (4 + own_type) * (backward and not size.adapters)
