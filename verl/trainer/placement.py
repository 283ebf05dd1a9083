"""Who does what, and where a run's processes live: here or in Ray, with GPUs or without, in which pools.

    place(config)      `auto` becomes what is there
    build_pools(...)   one pool of trainer.nnodes x trainer.n_gpus_per_node processes with actor, reference,
                       critic, and the rollout

The driver is the process that was started, wherever that is; it is in no pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch

from verl.config import Config, SFTConfig
from verl.single_controller.base import ResourcePool
from verl.trainer.ppo.passes import Passes

if TYPE_CHECKING:
    from verl.single_controller.ray import RaySession


class Role(Enum):
    """What a worker is for. The value is the name of its worker group.

    `RefPolicy` and `RewardModel` are names of verl's code; no worker of this trainer has them: the reference
    lives with the actor, and neural reward models are refused.
    """

    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"


@dataclass
class ResourcePoolManager:
    """Turns a specification of pools into pools, and finds the pool of a role.

    Attributes:
        resource_pool_spec: pool name -> processes on each node, e.g. {"global_pool": [8, 8]}.
        mapping: role -> pool name. Roles of one pool share its processes.
        backend: "local" (one in-process worker) or "ray".
        use_gpu: whether a process of a pool takes a GPU; None: if this machine has one.
        num_cpus_per_process: of Ray's CPUs, reserved by each process.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    backend: str = "ray"
    use_gpu: bool | None = None
    num_cpus_per_process: float = 0.25
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools; the Ray ones reserve nothing before the first worker group is built in them."""
        use_gpu = torch.cuda.is_available() if self.use_gpu is None else self.use_gpu
        for name, process_on_nodes in self.resource_pool_spec.items():
            if self.backend == "ray":
                from verl.single_controller.ray import RayResourcePool

                self.resource_pool_dict[name] = RayResourcePool(
                    process_on_nodes, use_gpu, self.num_cpus_per_process
                )
            else:
                self.resource_pool_dict[name] = ResourcePool(process_on_nodes)

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool that `role` was mapped to."""
        return self.resource_pool_dict[self.mapping[role]]


def roles_of(passes: Passes) -> list[Role]:
    """Who lives in each process of a run."""
    actor = Role.ActorRolloutRef if passes.reference else Role.ActorRollout
    return [actor, Role.Critic] if passes.values else [actor]


def processes_on_nodes(config: Config | SFTConfig) -> list[int]:
    """How many processes run on each node."""
    return [config.trainer.n_gpus_per_node] * config.trainer.nnodes


def build_pools(config: Config, roles: list[Role]) -> ResourcePoolManager:
    """The one pool of a run, which all roles share. Reserves nothing."""
    pools = ResourcePoolManager(
        resource_pool_spec={"global_pool": processes_on_nodes(config)},
        mapping=dict.fromkeys(roles, "global_pool"),
        backend=config.trainer.backend,
        use_gpu=config.trainer.device == "cuda",
        num_cpus_per_process=config.trainer.cpus_per_process,
    )
    pools.create_resource_pool()
    return pools


def num_processes(config: Config | SFTConfig) -> int:
    """Worker processes of the run. Supervised training has the one."""
    return sum(processes_on_nodes(config))


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
