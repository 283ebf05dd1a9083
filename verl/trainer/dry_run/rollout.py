"""Memory of a rollout engine in one process: its copy of the weights, its KV cache, and what it works with.

The sizes of the native engine's KV cache and copies come from the functions that build it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from verl.trainer.dry_run.shapes import ModelShapes
from verl.workers.rollout.build import (
    CUDA_RESERVE_BYTES,
    MAX_DEFAULT_KV_BYTES,
    most_on_cpu,
    own_weights_bytes,
    sequence_bytes,
    sequences_at_once,
)
from verl.workers.rollout.native.architecture import ModelSpec


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one process.

    Attributes:
        weights: of its own, beside the trainer's.
        wanted: KV cache for all its trajectories. most: what the configuration lets it take. sequence: of one
            trajectory of the greatest length, without which nothing can run.
        reserve: kept free beside it, for activations and logits of a step.
        arrival: while new weights come in.
    """

    weights: int
    wanted: int
    most: int
    sequence: int
    reserve: int
    arrival: int

    def cache(self, free: int | None) -> int:
        """The KV cache's size. free: bytes of the device that are left for it (None: on CPU nobody asks)."""
        room = self.most if free is None else min(self.most, free - self.reserve - self.weights)
        return max(0, min(room, self.wanted))


def rollout_memory(
    rollout: DictConfig,
    spec: ModelSpec | None,
    shapes: ModelShapes,
    device: str,
    device_bytes: int,
    dtype: torch.dtype,
    num_rows: int,
    is_copy: bool,
    stream_size: int,
    whole_set: int,
) -> RolloutMemory:
    """Of the engine that `build_engine` would make.

    Args:
        rollout: block of the configuration. shapes: of the policy. spec: what the native engine reads of
            it; None: a model that it does not run (transformers' engine has a cache for each sequence).
        dtype: of the engine. num_rows: trajectories of one process.
        is_copy: weights are made for the engine (gathered, merged, cast, sent), not the trainer's own.
        stream_size: bytes of an element of the weights that come. whole_set: bytes of those that exist at
            once while it takes them on CPU.
    """
    slots = sequences_at_once(rollout.max_num_seqs, num_rows)
    length, block = rollout.prompt_length, rollout.block_size
    copy = sum(p.numel for p in shapes.parameters if not p.is_adapter) * dtype.itemsize
    largest = max(p.numel for p in shapes.parameters) * stream_size
    on_cuda = device == "cuda"
    share = int(rollout.gpu_memory_utilization * device_bytes)
    position = 2 * len(shapes.layers) * shapes.dims.keys * dtype.itemsize
    sequence = -(-length // block) * block * position
    if rollout.name == "vllm":
        if on_cuda:  # its share of the GPU holds its weights and activations too
            wanted, most, reserve = share, share - copy - CUDA_RESERVE_BYTES, CUDA_RESERVE_BYTES
        else:
            most = int((rollout.kv_cache_gb or 0) * (1 << 30)) or MAX_DEFAULT_KV_BYTES
            wanted, reserve = (most if rollout.kv_cache_gb else slots * sequence + block * position), 0
        return RolloutMemory(copy, wanted, most, sequence, reserve, largest)
    if spec is None:
        return RolloutMemory(
            copy, slots * sequence, slots * sequence, sequence, CUDA_RESERVE_BYTES * on_cuda, largest
        )
    sequence = sequence_bytes(spec, dtype, length, block)
    if on_cuda:
        own = own_weights_bytes(spec, dtype) if is_copy else 0
        return RolloutMemory(own, slots * sequence, share, sequence, CUDA_RESERVE_BYTES, largest)
    most = most_on_cpu(rollout.kv_cache_gb) // (block * position) * block * position  # whole blocks
    return RolloutMemory(
        packed_bytes(spec, dtype), slots * sequence, most, sequence, 0, whole_set if is_copy else 0
    )


def packed_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the native engine's packed weights on CPU: the output matrix is one of its own, norms are
    float32.
    """
    total = 0
    for name, shape in spec.parameter_shapes().items():
        size = 4 if "norm" in name else dtype.itemsize
        total += size * torch.Size(shape).numel()
    return total
