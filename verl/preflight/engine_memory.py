"""Memory of one model's engine in one process: over FSDP2 or Megatron, trained or frozen.

    ModelShapes, layout, Precision -> Held: what the process holds of the model, and what a pass gathers
    Held, tokens of a pass         -> activations, the chunk of logits under way

Everything is in bytes. Weights, gradients and optimizer state are what torch allocates, to the byte. What a
pass takes is counted from what autograd keeps, op by op; it is an upper bound where rows share a beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from verl.preflight.shapes import ModelShapes, Parameter
from verl.utils.linear_logprob import CHUNK_ELEMENTS, MIN_CHUNK_ROWS
from verl.workers.engine.loading import Precision
from verl.workers.megatron.settings import ParallelSizes, StageLayout

PREFETCHED_UNITS = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class Held:
    """What one process has of a model.

    Attributes:
        shapes: of its tensors, as far as passes see them.
        weights, gradients, optimizer: that it keeps.
        num_sharing: processes that share the tokens of a sequence.
        gathered: whole weights that a pass works with, beyond those it keeps.
        exchanged: gradients on their way between processes in a backward pass.
        autocasts: computes in 16 bits from float32 weights, each cast when it is used.
        in_flight: micro-batches whose activations it keeps at once.
        keeps_gradients: their buffers stay between updates (grad_offload frees them).
    """

    shapes: ModelShapes
    weights: int
    gradients: int
    optimizer: int
    num_sharing: int
    gathered: int = 0
    exchanged: int = 0
    autocasts: bool = False
    in_flight: int = 1
    keeps_gradients: bool = False


@dataclass(frozen=True)
class FsdpLayout:
    """All processes hold alike. sequence: processes that share the tokens of each sequence (Ulysses)."""

    num_processes: int
    fsdp_size: int
    sequence: int

    @property
    def replicas(self) -> int:
        """Of the model, that take different trajectories."""
        return self.num_processes // self.sequence

    def kind(self, rank: int) -> int:
        """Equal for ranks that hold the same amounts."""
        return 0

    def position(self, rank: int) -> str:
        """The rank's place in each kind of parallelism, in words."""
        shard = self._shard(self.fsdp_size)
        shared = f" sp {rank % self.sequence}" if self.sequence > 1 else ""
        sharded = f" shard {rank % shard}/{shard}" if self.num_processes > 1 else ""
        copied = f" copy {rank // shard}" if shard < self.num_processes else ""
        return f"dp {rank // self.sequence}{shared}{sharded}{copied}"

    def _shard(self, fsdp_size: int) -> int:
        """Processes that a tensor is cut over; with hybrid sharding there are several such sets."""
        return fsdp_size if 0 < fsdp_size < self.num_processes else self.num_processes

    def hold(
        self, shapes: ModelShapes, precision: Precision, optimizer: str | None, fsdp: Any, rank: int
    ) -> Held:
        """What the rank holds. optimizer: "adamw" or "muon"; None: a frozen model. fsdp: `fsdp_config`."""
        shard, alone, compute = (
            self._shard(fsdp.fsdp_size),
            self.num_processes == 1,
            precision.compute.itemsize,
        )

        def stored(p: Parameter) -> int:  # rows are dealt out in equal parts, the last one padded
            numel = p.numel if alone else -(-p.shape[0] // shard) * (p.numel // p.shape[0])
            return numel * (4 if p.is_adapter else precision.model.itemsize)

        trained = [p for p in shapes.parameters if p.trained and optimizer is not None]
        by_adamw = [p for p in trained if optimizer != "muon" or not p.is_matrix]  # two moments and a counter
        units = [[p for p in unit if p in set(trained)] for unit in (*shapes.layers, shapes.root)]
        casts, reduce = precision.compute != precision.model, precision.reduce.itemsize
        if alone:  # autocast keeps the matrices that it has cast until the pass ends
            gathered = compute * casts * _count(p for p in shapes.parameters if len(p.shape) > 1)
            exchanged = 0
        else:
            largest = max((_count(layer) for layer in shapes.layers), default=0)
            at_work = _count(shapes.root) + PREFETCHED_UNITS * largest
            gathered = compute * (at_work if fsdp.reshard_after_forward else _count(shapes.parameters))
            # a unit's whole gradient, and the buffer that it is summed over processes in; without resharding
            # the gradients of all units wait for the last micro-batch (those of adapters always do)
            exchanged = max(map(_count, units)) * (compute + reduce)
            if not fsdp.reshard_after_forward or shapes.has_adapters:
                exchanged += sum(map(_count, units)) * reduce
        return Held(
            shapes,
            weights=sum(map(stored, shapes.parameters)),
            gradients=sum(map(stored, trained)),
            optimizer=sum(map(stored, trained)) + sum(stored(p) + 4 for p in by_adamw),
            num_sharing=self.sequence,
            gathered=gathered,
            exchanged=exchanged,
            autocasts=alone and casts and compute == 2,
        )


@dataclass(frozen=True)
class MegatronLayout:
    """Neighbouring ranks are those of a tensor group, then of a context group, of data, of the pipeline."""

    num_processes: int
    sizes: ParallelSizes
    layers_per_virtual_stage: int | None

    @property
    def replicas(self) -> int:
        return self.num_processes // self.sizes.replica

    def kind(self, rank: int) -> int:
        """The stage of the pipeline."""
        return rank * self.sizes.pipeline // self.num_processes

    def position(self, rank: int) -> str:
        tensor, context = self.sizes.tensor, self.sizes.context
        data = rank // (tensor * context) % self.replicas
        return f"dp {data} tp {rank % tensor} pp {self.kind(rank)} cp {rank // tensor % context}"

    def hold(
        self, shapes: ModelShapes, precision: Precision, optimizer: str | None, fsdp: Any, rank: int
    ) -> Held:
        """As FsdpLayout.hold. Weights have the type of the computation; the distributed optimizer's float32
        state (and weights, if those are of 16 bits) is dealt out over the processes that hold the same part.
        """
        here = self.shapes_of(shapes, self.kind(rank))
        compute = precision.compute.itemsize
        trained = _count(p for p in here.parameters if p.trained) if optimizer is not None else 0
        return Held(
            here,
            weights=_count(here.parameters) * compute,
            gradients=(4 if precision.reduce.itemsize == 4 else compute) * trained,
            optimizer=-(-trained // (self.replicas * self.sizes.context)) * (12 if compute < 4 else 8),
            num_sharing=self.sizes.context,
            in_flight=self.sizes.pipeline - self.kind(rank),
            keeps_gradients=optimizer is not None,
        )

    def shapes_of(self, shapes: ModelShapes, stage: int) -> ModelShapes:
        """The tensors of one stage's processes: matrices cut by the tensor size, norms whole."""
        tensor, last = self.sizes.tensor, self.sizes.pipeline - 1
        places = StageLayout.of(len(shapes.layers), self.sizes.pipeline, self.layers_per_virtual_stage)
        layers = tuple(
            tuple(_cut(p, tensor) for p in layer)
            for number, layer in enumerate(shapes.layers)
            if places.place(number)[0] == stage
        )
        ties = shapes.has_vocab_head and not any("lm_head" in p.name for p in shapes.root)
        root = []
        for p in shapes.root:
            embeds = "embed_tokens" in p.name
            if stage == (0 if embeds else last) or (embeds and ties and stage == last):
                root.append(_cut(p, tensor))
        dims = shapes.dims
        dims = replace(
            dims,
            intermediate=dims.intermediate // tensor,
            queries=dims.queries // tensor,
            keys=dims.keys // tensor,
            vocab=-(-dims.vocab // tensor),
        )
        return ModelShapes(layers, tuple(root), dims, shapes.has_vocab_head and stage == last)


def _cut(parameter: Parameter, tensor: int) -> Parameter:
    """One tensor rank's part: rows of matrices that widen and their biases, columns of those that narrow."""
    name, shape = parameter.name, parameter.shape
    narrows = "o_proj" in name or "down_proj" in name
    if "norm" in name or "value_head" in name or (len(shape) == 1 and narrows):
        return parameter
    axis = 1 if narrows else 0
    return replace(parameter, shape=(*shape[:axis], -(-shape[axis] // tensor), *shape[axis + 1 :]))


def _count(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel for p in parameters)


# ------------------------------------------------------------------------------------------- activations


def update_pass(held: Held, precision: Precision, tokens: int, checkpointing: bool) -> tuple[int, int]:
    """(activations, chunk of logits) of a forward and backward pass over `tokens` loss tokens.

    With checkpointing each layer keeps its input alone, and one layer at a time is computed again.
    """
    layer = layer_bytes(held.shapes, precision, held.autocasts)
    residual = held.shapes.dims.hidden * (4 if held.autocasts else precision.compute.itemsize)
    layers = len(held.shapes.layers)
    kept, again = (residual * layers, layer) if checkpointing else (layer * layers, 0)
    ends = 5 * residual  # embedding, last norm, hidden states of the loss tokens and their gradient
    head = _head(held.shapes, precision, tokens, backward=True)
    return tokens * (held.in_flight * kept + again + ends), head


def forward_pass(held: Held, precision: Precision, tokens: int) -> tuple[int, int]:
    """(activations, chunk of logits) of a pass without gradient: one layer's results at a time."""
    dims, size = held.shapes.dims, precision.compute.itemsize
    widest = max(3 * dims.intermediate, 3 * dims.queries + 2 * dims.keys)
    head = _head(held.shapes, precision, tokens, backward=False)
    return tokens * (size * (widest + 3 * dims.hidden) + 8 * dims.hidden), head


def layer_bytes(shapes: ModelShapes, precision: Precision, autocasts: bool) -> int:
    """What autograd keeps of one decoder layer for each token.

    Norms keep their input and its normalised form in float32 and their output as often as a product reads
    it; attention queries, keys, values and its output twice; the MLP both halves, the activation and the
    product.
    """
    dims, size = shapes.dims, precision.compute.itemsize
    if size == 4:
        norms, head_norm = 24, 8
    else:
        norms, head_norm = 26 if autocasts else 16, 6
    total = norms * dims.hidden + size * (3 * dims.queries + 2 * dims.keys + 4 * dims.intermediate)
    return total + (head_norm * (dims.queries + dims.keys) if dims.qk_norm else 0)


def _head(shapes: ModelShapes, precision: Precision, tokens: int, backward: bool) -> int:
    """Logits of one chunk in float32 and what is computed from them; the gradient of the output matrix, in
    float32 and in its own type.
    """
    if not shapes.has_vocab_head:
        return 0
    vocab, size = shapes.dims.vocab, precision.compute.itemsize
    rows = min(tokens, max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocab))
    own_type = size if size < 4 else 0
    chunk = rows * vocab * ((12 if backward else 8) + own_type)
    if not backward or shapes.has_adapters:
        return chunk
    return chunk + vocab * shapes.dims.hidden * (4 + own_type)
