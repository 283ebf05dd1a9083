"""Where a run's processes live: here or in Ray, with GPUs or without, in which pools.

    pools_of(config)   global_pool: trainer.nnodes x trainer.n_gpus_per_node processes with actor, reference,
                       critic, and the rollout
    place(config)      `auto` becomes what is there

The driver is the process that was started, wherever that is; it is in no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.config import Config, SFTConfig
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.roles import Role, actor_role

if TYPE_CHECKING:
    from verl.single_controller.ray import RaySession

GLOBAL_POOL = "global_pool"


@dataclass(frozen=True)
class PoolPlan:
    """One pool. process_on_nodes: processes on each of its nodes. roles: that live in each of them."""

    name: str
    process_on_nodes: tuple[int, ...]
    roles: tuple[Role, ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(node of the pool, number on that node) of each rank."""
        return [(node, local) for node, count in enumerate(self.process_on_nodes) for local in range(count)]


def pools_of(config: Config, passes: Passes) -> list[PoolPlan]:
    """The pools of a run: one."""
    trainer = config.trainer
    roles = [actor_role(passes.reference)]
    if passes.values:
        roles.append(Role.Critic)
    return [PoolPlan(GLOBAL_POOL, (trainer.n_gpus_per_node,) * trainer.nnodes, tuple(roles))]


def num_processes(config: Config | SFTConfig) -> int:
    """Worker processes of the run. Supervised training has the one."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def place(config: Config | SFTConfig) -> None:
    """Fill in `trainer.backend` and `trainer.device` where they are `auto`, from what is there.

    Raises:
        ValueError: GPUs are asked for that are not there.
    """
    trainer = config.trainer
    processes = num_processes(config)
    if trainer.backend == "auto":
        trainer.backend = "local" if processes == 1 else "ray"
    if trainer.device == "cpu":
        return
    if trainer.backend == "ray":
        import ray  # a local run does without it

        num_gpus, where = int(ray.cluster_resources().get("GPU", 0)), "the Ray cluster"
    else:
        num_gpus, where = torch.cuda.device_count(), "this machine"
    if trainer.device == "auto" and processes == 1:
        trainer.device = "cuda" if num_gpus else "cpu"
    elif num_gpus < processes:
        raise ValueError(
            f"found {num_gpus} GPUs on {where}, but trainer.nnodes={trainer.nnodes} and "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} ask for {processes}. Set "
            "trainer.n_gpus_per_node, or trainer.device=cpu to train in processes without a GPU."
        )
    trainer.device = "cpu" if num_gpus == 0 else "cuda"


def order_of_kernels(config: Config) -> dict[str, str]:
    """Variables of processes that share a layer's matrices (tensor parallel) on CUDA: with one queue kernels
    start in the order in which they were called, so that communication begins before the product that it
    runs beside takes the whole GPU.
    """
    actor = config.actor_rollout_ref.actor
    shared = actor.strategy == "megatron" and actor.megatron.tensor_model_parallel_size > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if shared and config.trainer.device == "cuda" else {}


def needs_ray(config: Config | SFTConfig) -> bool:
    """Whether this run is on Ray: it has more than one process, or `trainer.backend=ray`."""
    backend = config.trainer.backend
    return backend == "ray" or (backend == "auto" and num_processes(config) > 1)


def start_ray(config: Config | SFTConfig) -> RaySession | None:
    """A Ray session if this run needs one, else None."""
    if not needs_ray(config):
        return None
    from verl.single_controller.ray import init_ray  # a local run does without it

    return init_ray()
