"""Memory of a model that is trained, or frozen beside one, on one process: what TrainEngine (FSDP2) takes.

    ModelShapes, Spread, Precision -> EngineMemory: what stays, and what a pass takes besides
    Dims, tokens of a pass         -> activations, the chunk of logits

Everything is in bytes. Weights, gradients and optimizer state are what torch allocates, to the byte; what a
pass takes is counted from what autograd keeps, op by op, and is an upper bound where rows share a beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import float32

from verl.trainer.dry_run.shapes import Dims, ModelShapes, Parameter
from verl.utils.linear_logprob import CHUNK_ELEMENTS, MIN_CHUNK_ROWS
from verl.workers.engine.engine import Precision

PREFETCHED_UNITS = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class Spread:
    """How FSDP2 lays a model over processes: each holds 1 / `shard` of every tensor, cut along its first
    dimension; there are num_processes / shard such sets (hybrid sharding). One process holds it plain.
    """

    num_processes: int
    shard: int

    @classmethod
    def of(cls, num_processes: int, fsdp_size: int) -> Spread:
        return cls(num_processes, fsdp_size if 0 < fsdp_size < num_processes else num_processes)

    @property
    def is_sharded(self) -> bool:
        return self.num_processes > 1

    def local(self, parameter: Parameter) -> int:
        """Elements of a tensor on each process: its rows are dealt out in equal parts, the last padded."""
        if not self.is_sharded:
            return parameter.numel
        rows = parameter.shape[0]
        return -(-rows // self.shard) * (parameter.numel // rows)


@dataclass(frozen=True)
class EngineMemory:
    """weights, gradients, optimizer: of this process. gathered: whole weights that a pass works with, beyond
    them. exchanged: gradients on their way between processes in a backward pass.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    exchanged: int


def engine_memory(
    shapes: ModelShapes,
    spread: Spread,
    precision: Precision,
    optimizer: str | None = None,
    reshards: bool = True,
) -> EngineMemory:
    """Of one process.

    Args:
        optimizer: "adamw" or "muon"; None for a frozen model.
        reshards: `fsdp_config.reshard_after_forward`.
    """
    stored = {p: _stored_size(p, precision) for p in shapes.parameters}
    trained = [p for p in shapes.parameters if p.trained and optimizer is not None]
    gradients = sum(spread.local(p) * stored[p] for p in trained)
    state = sum(
        spread.local(p) * stored[p] * (1 if optimizer == "muon" and p.is_matrix else 2) for p in trained
    )
    if optimizer == "muon":
        state += 4 * sum(not p.is_matrix for p in trained)
    elif optimizer is not None:
        state += 4 * len(trained)  # AdamW's step counters
    return EngineMemory(
        weights=sum(spread.local(p) * size for p, size in stored.items()),
        gradients=gradients,
        optimizer=state,
        gathered=_gathered(shapes, spread, precision, reshards),
        exchanged=_exchanged(shapes, spread, precision, reshards) if optimizer is not None else 0,
    )


def _stored_size(parameter: Parameter, precision: Precision) -> int:
    return (float32 if parameter.is_adapter else precision.model).itemsize


def _count(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def _gathered(shapes: ModelShapes, spread: Spread, precision: Precision, reshards: bool) -> int:
    size = precision.compute.itemsize
    if not spread.is_sharded:  # autocast keeps the matrices that it has cast until the pass ends
        casts = precision.compute != precision.model
        return size * _count(p for p in shapes.parameters if len(p.shape) > 1) if casts else 0
    if not reshards:
        return size * _count(shapes.parameters)
    largest = max((_count(layer) for layer in shapes.layers), default=0)
    return size * (_count(shapes.root) + PREFETCHED_UNITS * largest)


def _exchanged(shapes: ModelShapes, spread: Spread, precision: Precision, reshards: bool) -> int:
    """A unit's whole gradient, and the buffer that it is summed over processes in; without resharding the
    whole gradients of all units wait for the last micro-batch (those of adapters always do).
    """
    if not spread.is_sharded:
        return 0
    units = [[p for p in unit if p.trained] for unit in (*shapes.layers, shapes.root)]
    sizes = [_count(unit) for unit in units]
    on_the_way = max(sizes) * (precision.compute.itemsize + precision.reduce.itemsize)
    waits = not reshards or any(p.is_adapter for p in shapes.parameters)
    return on_the_way + (sum(sizes) * precision.reduce.itemsize if waits else 0)


# ------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class PassMemory:
    """What one forward (and backward) pass takes: activations, and the chunk of logits under way."""

    activations: int
    head: int


def update_pass(
    shapes: ModelShapes,
    precision: Precision,
    autocasts: bool,
    tokens: int,
    checkpointing: bool,
    in_flight: int = 1,
) -> PassMemory:
    """Forward and backward pass over `tokens` tokens, every one of them a loss token.

    With checkpointing each layer keeps its input alone, and one layer at a time is computed again.

    Args:
        autocasts: 16-bit computation with float32 weights that are cast at each use.
        in_flight: micro-batches whose activations are kept at once (stages of a pipeline).
    """
    layer = layer_bytes(shapes.dims, precision, autocasts)
    residual = shapes.dims.hidden * (4 if autocasts else precision.compute.itemsize)
    layers = len(shapes.layers)
    kept, again = (residual * layers, layer) if checkpointing else (layer * layers, 0)
    ends = 5 * residual  # embedding, last norm, hidden states of the loss tokens and their gradient
    return PassMemory(
        tokens * (in_flight * kept + again + ends), _head(shapes, precision, tokens, backward=True)
    )


def forward_pass(shapes: ModelShapes, precision: Precision, tokens: int) -> PassMemory:
    """A pass without gradient: one layer's intermediate results at a time."""
    dims, size = shapes.dims, precision.compute.itemsize
    widest = max(3 * dims.intermediate, 3 * dims.queries + 2 * dims.keys)
    return PassMemory(
        tokens * (size * (widest + 3 * dims.hidden) + 8 * dims.hidden),
        _head(shapes, precision, tokens, backward=False),
    )


def layer_bytes(dims: Dims, precision: Precision, autocasts: bool) -> int:
    """What autograd keeps of one decoder layer for each token.

    Norms keep their input and its normalised form in float32 and their output as often as a product reads
    it; attention queries, keys, values and its output twice; the MLP both halves, the activation and the
    product.
    """
    size = precision.compute.itemsize
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
    chunk = rows * vocab * ((12 if backward else 8) + (size if size < 4 else 0))
    is_frozen = any(p.is_adapter for p in shapes.parameters)
    if not backward or is_frozen:
        return chunk
    matrix = vocab * shapes.dims.hidden
    return chunk + matrix * (4 + (size if size < 4 else 0))
