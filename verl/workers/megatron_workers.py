"""The workers of a training job on megatron-core: those of `fsdp_workers`, with other engines.

Each replica of a model is cut over tensor x pipeline x context processes, which work on the same rows. Each
replica has rows of its own. Rollouts work as with FSDP: each process samples rows of its own, or several
processes share one vLLM model. In both cases the rollout engine takes whole weights from the training
engine's stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from verl.config.policy import Actor, Megatron, Optim
from verl.config.schema import AnyFsdp, Critic
from verl.workers import fsdp_workers
from verl.workers.engine.loading import Precision
from verl.workers.engine.training_engine import Engine
from verl.workers.megatron.settings import ParallelSizes


def sizes_of(megatron: Megatron) -> ParallelSizes:
    """Return the parallel sizes of the `megatron` block of the actor, the reference or the critic."""
    return ParallelSizes(
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )


class _MegatronProcess(fsdp_workers.TrainingWorker):
    """The part that all workers of this module have in common."""

    has_groups = False  # whether this process has Megatron's process groups

    def init_process_group(self, kind: str, timeout_seconds: float = 1800.0) -> torch.device:
        """Join torch.distributed as any worker does, and return this rank's device.

        Megatron's groups need torch.distributed even for a single process, which joins a group of its own.
        """
        device = super().init_process_group(kind, timeout_seconds)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self.joined_process_group = True
        return device

    def count_token_sharing(self, block: Actor | Critic) -> int:
        return int(block.megatron.context_parallel_size)

    def build_engine(
        self,
        model: Mapping[str, Any],
        fsdp_config: AnyFsdp,
        megatron: Megatron | None = None,
        optim: Optim | None = None,
        grad_clip: float = 1.0,
        is_policy: bool = True,
        with_adapters: bool = True,
    ) -> Engine:
        """Build an engine over megatron-core; the arguments are those of `TrainingWorker.build_engine`."""
        # imported here because these import Megatron, which the driver does not need
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
    """One process of the policy; the arguments are those of `fsdp_workers.ActorRolloutRefWorker`."""

    streams_own_parameters = False


class MegatronCriticWorker(_MegatronProcess, fsdp_workers.CriticWorker):
    """One process of the critic; the arguments are those of `fsdp_workers.CriticWorker`."""
