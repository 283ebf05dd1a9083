"""The workers of a training job on megatron-core: those of `fsdp_workers`, with other engines.

Each replica of a model is cut over tensor x pipeline x context processes, which work on the same rows;
replicas have rows of their own. Rollouts are as everywhere: each process samples rows of its own with whole
weights, which it takes from the engine's stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torch import device as Device

from verl.single_controller.base import Worker
from verl.workers import fsdp_workers
from verl.workers.engine.base import Engine
from verl.workers.engine.precision import Precision
from verl.workers.megatron.settings import ParallelSizes


@dataclass(frozen=True)
class Layout:
    """How a model is cut."""

    sizes: ParallelSizes
    layers_per_virtual_stage: int | None
    sequence_parallel: bool


def layout_of(megatron: DictConfig) -> Layout:
    """megatron: the `megatron` block of the actor, the reference or the critic."""
    sizes = ParallelSizes(
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    return Layout(sizes, megatron.num_layers_per_virtual_pipeline_stage, megatron.sequence_parallel)


def _build_engine(
    model: Mapping[str, Any],
    layout: Layout,
    fsdp_config: DictConfig,
    device: Device,
    is_policy: bool,
    optim: DictConfig | None,
    grad_clip: float,
) -> Engine:
    """optim=None: a frozen model."""
    from verl.workers.megatron.engine import MegatronEngine  # imports Megatron, which the driver does without
    from verl.workers.megatron.model import build_model

    precision = Precision.from_config(fsdp_config, device, trained=optim is not None)
    built = build_model(
        model,
        layout.sizes,
        device,
        precision.compute,
        is_policy,
        layout.sequence_parallel,
        layout.layers_per_virtual_stage,
    )
    return MegatronEngine(built, model, precision, fsdp_config, device, optim, grad_clip)


class _MegatronProcess(Worker):
    """What all workers here do alike."""

    def init_process_group(self, kind: str, timeout_seconds: float = 1800.0) -> Device:
        """As any worker; but Megatron's groups need torch.distributed for a single process too."""
        device = super().init_process_group(kind, timeout_seconds)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return device

    def close(self) -> None:
        from verl.workers.megatron import parallel_state  # as above

        parallel_state.destroy()
        super().close()


class ActorRolloutRefWorker(_MegatronProcess, fsdp_workers.ActorRolloutRefWorker):
    """One process of the policy; arguments as in `fsdp_workers`."""

    streams_parameters = False

    def _num_sharing(self) -> int:
        size: int = self.config.actor.megatron.context_parallel_size
        return size

    def _engine(
        self, block: DictConfig, model: Mapping[str, Any], trained: bool, adapted: bool = True
    ) -> Engine:
        actor = self.config.actor
        optim = actor.optim if trained else None
        layout = layout_of(block.megatron)
        return _build_engine(model, layout, block.fsdp_config, self.device, True, optim, actor.grad_clip)


class CriticWorker(_MegatronProcess, fsdp_workers.CriticWorker):
    """One process of the critic; arguments as in `fsdp_workers`."""

    def _num_sharing(self) -> int:
        size: int = self.config.megatron.context_parallel_size
        return size

    def _engine(self) -> Engine:
        config = self.config
        return _build_engine(
            config.model,
            layout_of(config.megatron),
            config.model.fsdp_config,
            self.device,
            False,
            config.optim,
            config.grad_clip,
        )
