"""Who does what, and in which pool of processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from verl.single_controller.base import ResourcePool


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


def actor_role(with_reference: bool) -> Role:
    """The role of the actor's workers: with or without a reference model beside it."""
    return Role.ActorRolloutRef if with_reference else Role.ActorRollout


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
