"""Where a run's processes live: here or in Ray, with GPUs or without, in which pools.

    pools_of(config)   global_pool: trainer.nnodes x trainer.n_gpus_per_node processes with actor, reference,
                       critic, and the rollout; with trainer.rollout_pool the rollout has a pool of its own
    place(config)      `auto` becomes what is there

The driver is the process that was started, wherever that is; it is in no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.roles import Role, actor_role

if TYPE_CHECKING:
    from verl.single_controller.ray import RaySession

GLOBAL_POOL, ROLLOUT_POOL = "global_pool", "rollout_pool"


@dataclass(frozen=True)
class PoolPlan:
    """One pool. process_on_nodes: processes on each of its nodes. roles: that live in each of them.
    nodes_before: nodes of the pools before it.
    """

    name: str
    process_on_nodes: tuple[int, ...]
    roles: tuple[Role, ...]
    nodes_before: int = 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(node of the pool, number on that node) of each rank."""
        return [(node, local) for node, count in enumerate(self.process_on_nodes) for local in range(count)]

    @property
    def trains(self) -> bool:
        return Role.Rollout not in self.roles

    @property
    def rolls_out(self) -> bool:
        return any(role in (Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef) for role in self.roles)


def pools_of(config: DictConfig, passes: Passes) -> list[PoolPlan]:
    """The pools of a run; the actor's comes first."""
    trainer = config.trainer
    apart = trainer.rollout_pool.n_gpus_per_node is not None
    roles = [actor_role(passes.reference, with_rollout=not apart)]
    if passes.values:
        roles.append(Role.Critic)
    pools = [PoolPlan(GLOBAL_POOL, (trainer.n_gpus_per_node,) * trainer.nnodes, tuple(roles))]
    if apart:
        own = (trainer.rollout_pool.n_gpus_per_node,) * trainer.rollout_pool.nnodes
        pools.append(PoolPlan(ROLLOUT_POOL, own, (Role.Rollout,), nodes_before=trainer.nnodes))
    return pools


def num_processes(config: DictConfig) -> int:
    """Worker processes of the run, in all its pools. Supervised training has the one."""
    trainer, pool = config.trainer, config.trainer.get("rollout_pool")
    apart = 0 if pool is None or pool.n_gpus_per_node is None else pool.nnodes * pool.n_gpus_per_node
    return trainer.nnodes * trainer.n_gpus_per_node + apart


def place(config: DictConfig) -> None:
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
            f"found {num_gpus} GPUs on {where}, but {_asked_for(config)} ask for {processes}. Set "
            "trainer.n_gpus_per_node, or trainer.device=cpu to train in processes without a GPU."
        )
    trainer.device = "cpu" if num_gpus == 0 else "cuda"


def order_of_kernels(config: DictConfig) -> dict[str, str]:
    """Variables of processes that share a layer's matrices (tensor parallel) on CUDA: with one queue kernels
    start in the order in which they were called, so that communication begins before the product that it
    runs beside takes the whole GPU.
    """
    actor = config.actor_rollout_ref.actor
    shared = actor.strategy == "megatron" and actor.megatron.tensor_model_parallel_size > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if shared and config.trainer.device == "cuda" else {}


def _asked_for(config: DictConfig) -> str:
    trainer, pool = config.trainer, config.trainer.get("rollout_pool")
    words = f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if pool is None or pool.n_gpus_per_node is None:
        return words
    return f"{words} with trainer.rollout_pool of {pool.nnodes} nodes x {pool.n_gpus_per_node}"


def start_ray(config: DictConfig) -> RaySession | None:
    """A Ray session if this run needs one (more than one process, or `trainer.backend=ray`), else None."""
    processes = num_processes(config)
    if config.trainer.backend == "local" or (config.trainer.backend == "auto" and processes == 1):
        return None
    from verl.single_controller.ray import init_ray  # a local run does without it

    return init_ray()
