"""The workers of a training job on megatron-core: those of `fsdp_workers`, with other engines.

Each replica of a model is cut over tensor x pipeline x context processes, which work on the same rows;
replicas have rows of their own. Rollouts are as everywhere: each process samples rows of its own, or several
do that share a model of vLLM's, with whole weights that it takes from the engine's stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from verl.config.policy import Actor, Megatron
from verl.config.schema import Critic
from verl.workers import fsdp_workers
from verl.workers.engine.base import Engine
from verl.workers.engine.loading import Precision
from verl.workers.megatron.settings import ParallelSizes


def sizes_of(megatron: Megatron) -> ParallelSizes:
    """megatron: the `megatron` block of the actor, the reference or the critic."""
    return ParallelSizes(
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )


class _MegatronProcess(fsdp_workers.TrainingWorker):
    """What all workers here do alike."""

    has_groups = False  # Megatron's, in this process

    def init_process_group(self, kind: str, timeout_seconds: float = 1800.0) -> torch.device:
        """As any worker; but Megatron's groups need torch.distributed for a single process too."""
        device = super().init_process_group(kind, timeout_seconds)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return device

    def processes_sharing(self, block: Actor | Critic) -> int:
        return int(block.megatron.context_parallel_size)

    def build_engine(
        self,
        model: Mapping[str, Any],
        fsdp_config: Mapping[str, Any],
        megatron: Megatron | None = None,
        optim: Mapping[str, Any] | None = None,
        grad_clip: float = 1.0,
        is_policy: bool = True,
        adapted: bool = True,
    ) -> Engine:
        """As any worker's, over megatron-core."""
        # these import Megatron, which the driver does without
        from verl.workers.megatron.megatron_engine import MegatronEngine
        from verl.workers.megatron.model import build_model

        assert megatron is not None
        self.has_groups = True
        precision = Precision.from_config(fsdp_config, self.device, trained=optim is not None)
        built = build_model(model, sizes_of(megatron), self.device, precision.compute, is_policy)
        return MegatronEngine(built, model, precision, fsdp_config, self.device, optim, grad_clip)

    def close(self) -> None:
        super().close()
        if self.has_groups:
            from verl.workers.megatron import parallel_state

            parallel_state.destroy()


class MegatronActorRolloutRefWorker(_MegatronProcess, fsdp_workers.ActorRolloutRefWorker):
    """One process of the policy; arguments as in `fsdp_workers`."""

    streams_parameters = False


class MegatronCriticWorker(_MegatronProcess, fsdp_workers.CriticWorker):
    """One process of the critic; arguments as in `fsdp_workers`."""
