"""The groups of processes that hold parts of a model: tensor, context, data and pipeline groups.

    torch.distributed's ranks --initialize(sizes)--> Megatron's groups, one set per process

Megatron's groups are global in a process, so the actor, the reference and the critic of one process have the
same sizes. The first of them creates the groups, and the others use them. Other sizes are refused.
Neighbouring ranks are those of a tensor group, then of a context group, then of data, then of the pipeline.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from verl.single_controller.base import DataPosition
from verl.workers.megatron import cpu_support
from verl.workers.megatron.settings import ParallelSizes

_made: ParallelSizes | None = None


def initialize(sizes: ParallelSizes, device: torch.device) -> None:
    """Create the groups, once in a process.

    All processes call it together, after torch.distributed is initialised.

    Raises ValueError if the processes can't be divided so, or if the groups were created with other sizes.
    """
    global _made
    if _made is not None:
        if _made != sizes:
            raise ValueError(
                f"Actor, reference and critic of one process share Megatron's groups: found "
                f"{sizes.description} after {_made.description}; give them the same sizes."
            )
        return
    sizes.check(dist.get_world_size())
    cpu_support.install(device)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        create_gloo_process_groups=False,
    )
    initialize_rng_tracker(inference_rng_tracker=True)  # without states, because no layer draws at random
    _made = sizes


def destroy() -> None:
    """Forget the groups, so that the process may create others."""
    global _made
    mpu.destroy_model_parallel()
    _made = None


def data_position() -> DataPosition:
    """Return this process's replica, and whether the process leads it.

    The leader of a replica is the first rank of its last pipeline stage.
    """
    leads = (
        mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_context_parallel_rank() == 0
        and mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
    )
    return DataPosition(mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), leads)
