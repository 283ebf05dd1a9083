"""How a model lies over the processes of a pool: by FSDP2, or by Megatron.

configuration, pool -> Layout;   layout.position(rank): where it stands, in words
                                 layout.part(shapes, ..., rank): what it holds -> Part
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from omegaconf import DictConfig

from verl.trainer.dry_run.shapes import ModelShapes, Parameter
from verl.trainer.dry_run.training import EngineMemory, Spread, engine_memory
from verl.trainer.placement import PoolPlan
from verl.workers.engine.precision import Precision
from verl.workers.megatron.settings import ParallelSizes, StageLayout


@dataclass(frozen=True)
class Part:
    """What one process has of a model.

    Attributes:
        shapes: of its tensors, as far as passes see them.
        memory: what its engine holds.
        autocasts: computes in 16 bits from float32 weights, each cast when it is used.
        token_share: of a sequence's tokens, it has one in so many.
        in_flight: micro-batches whose activations it keeps at once.
        keeps_gradients: their buffers stay between updates (grad_offload frees them).
    """

    shapes: ModelShapes
    memory: EngineMemory
    autocasts: bool
    token_share: int
    in_flight: int
    keeps_gradients: bool


class Layout(Protocol):
    """replicas: of the model that take different trajectories."""

    @property
    def replicas(self) -> int: ...

    def kind(self, rank: int) -> Hashable:
        """Equal for ranks that hold the same amounts."""

    def position(self, rank: int) -> str:
        """Its place in each kind of parallelism, in words."""

    def part(
        self,
        shapes: ModelShapes,
        precision: Precision,
        optimizer: str | None,
        fsdp: DictConfig,
        rank: int,
    ) -> Part:
        """What the rank holds of a model. optimizer: None for a frozen one. fsdp: its `fsdp_config`."""


def layout_of(config: DictConfig, pool: PoolPlan) -> Layout:
    """ValueError: the processes, or the layers, can't be dealt out."""
    actor = config.actor_rollout_ref.actor
    if not pool.trains:
        return RolloutLayout(pool.world_size)
    if actor.strategy == "megatron":
        block = actor.megatron
        sizes = ParallelSizes(
            block.tensor_model_parallel_size,
            block.pipeline_model_parallel_size,
            block.context_parallel_size,
        )
        sizes.check(pool.world_size)
        return MegatronLayout(pool.world_size, sizes, block.num_layers_per_virtual_pipeline_stage)
    return FsdpLayout(
        pool.world_size, actor.fsdp_config.fsdp_size, max(1, actor.ulysses_sequence_parallel_size)
    )


@dataclass(frozen=True)
class RolloutLayout:
    """Processes that only sample: each has a whole model."""

    num_processes: int

    @property
    def replicas(self) -> int:
        return self.num_processes

    def kind(self, rank: int) -> Hashable:
        return 0

    def position(self, rank: int) -> str:
        return f"dp {rank}"

    def part(
        self, shapes: ModelShapes, precision: Precision, optimizer: str | None, fsdp: DictConfig, rank: int
    ) -> Part:
        raise NotImplementedError("a rollout process trains nothing")


@dataclass(frozen=True)
class FsdpLayout:
    """All processes alike. fsdp_size: of the groups that a tensor is sharded over (-1: all); sequence:
    processes that share the tokens of each sequence.
    """

    num_processes: int
    fsdp_size: int
    sequence: int

    @property
    def replicas(self) -> int:
        return self.num_processes // self.sequence

    def kind(self, rank: int) -> Hashable:
        return 0

    def position(self, rank: int) -> str:
        spread = Spread.of(self.num_processes, self.fsdp_size)
        words = [f"dp {rank // self.sequence}"]
        if self.sequence > 1:
            words.append(f"sp {rank % self.sequence}")
        if spread.is_sharded:
            words.append(f"shard {rank % spread.shard}/{spread.shard}")
        if spread.shard < self.num_processes:
            words.append(f"copy {rank // spread.shard}")
        return " ".join(words)

    def part(
        self, shapes: ModelShapes, precision: Precision, optimizer: str | None, fsdp: DictConfig, rank: int
    ) -> Part:
        spread = Spread.of(self.num_processes, fsdp.fsdp_size)
        memory = engine_memory(shapes, spread, precision, optimizer, bool(fsdp.reshard_after_forward))
        mixed = precision.compute != precision.model and precision.compute.itemsize == 2
        autocasts = mixed and not spread.is_sharded
        return Part(shapes, memory, autocasts, self.sequence, 1, keeps_gradients=False)


@dataclass(frozen=True)
class MegatronLayout:
    """Neighbouring ranks are those of a tensor group, then of a context group, of data, of the pipeline."""

    num_processes: int
    sizes: ParallelSizes
    layers_per_virtual_stage: int | None

    @property
    def replicas(self) -> int:
        return self.num_processes // self.sizes.replica

    def _stage(self, rank: int) -> int:
        return rank * self.sizes.pipeline // self.num_processes

    def kind(self, rank: int) -> Hashable:
        return self._stage(rank)

    def position(self, rank: int) -> str:
        tensor, context = self.sizes.tensor, self.sizes.context
        data = rank // (tensor * context) % self.replicas
        return f"dp {data} tp {rank % tensor} pp {self._stage(rank)} cp {rank // tensor % context}"

    def part(
        self, shapes: ModelShapes, precision: Precision, optimizer: str | None, fsdp: DictConfig, rank: int
    ) -> Part:
        """Weights in the type of the computation. The distributed optimizer's float32 state (and weights, if
        those are of 16 bits) is dealt out over the processes that hold the same part.
        """
        here = self.shapes_of(shapes, self._stage(rank))
        numel = sum(p.numel for p in here.parameters)
        trained = sum(p.numel for p in here.parameters if p.trained) if optimizer is not None else 0
        copies = self.replicas * self.sizes.context
        main = 4 if precision.compute.itemsize < 4 else 0
        memory = EngineMemory(
            weights=numel * precision.compute.itemsize,
            gradients=(4 if precision.reduce.itemsize == 4 else precision.compute.itemsize) * trained,
            optimizer=-(-trained // copies) * (8 + main),
            gathered=0,
            exchanged=0,
        )
        in_flight = self.sizes.pipeline - self._stage(rank)
        return Part(here, memory, False, self.sizes.context, in_flight, keeps_gradients=optimizer is not None)

    def shapes_of(self, shapes: ModelShapes, stage: int) -> ModelShapes:
        """The tensors of one stage's processes: matrices cut by the tensor size, norms whole."""
        tensor, pipeline = self.sizes.tensor, self.sizes.pipeline
        places = StageLayout.of(len(shapes.layers), pipeline, self.layers_per_virtual_stage)
        layers = tuple(
            tuple(_cut(p, tensor) for p in layer)
            for number, layer in enumerate(shapes.layers)
            if places.place(number)[0] == stage
        )
        root, has_head = [], any("lm_head" in p.name for p in shapes.root)
        for p in shapes.root:
            embeds = "embed_tokens" in p.name
            ties = embeds and shapes.has_vocab_head and not has_head
            is_here = stage == 0 if embeds else stage == pipeline - 1
            if is_here or (ties and stage == pipeline - 1):
                root.append(_cut(p, tensor))
        dims = replace(
            shapes.dims,
            intermediate=shapes.dims.intermediate // tensor,
            queries=shapes.dims.queries // tensor,
            keys=shapes.dims.keys // tensor,
            vocab=-(-shapes.dims.vocab // tensor),
        )
        return ModelShapes(layers, tuple(root), dims, shapes.has_vocab_head and stage == pipeline - 1)


def _cut(parameter: Parameter, tensor: int) -> Parameter:
    """One tensor rank's part: rows of matrices that widen and their biases, columns of those that narrow."""
    name, shape = parameter.name, parameter.shape
    if (
        "norm" in name
        or "value_head" in name
        or (len(shape) == 1 and ("o_proj" in name or "down_proj" in name))
    ):
        return parameter
    axis = 1 if "o_proj" in name or "down_proj" in name else 0
    size = -(-shape[axis] // tensor)
    return replace(parameter, shape=(*shape[:axis], size, *shape[axis + 1 :]))
