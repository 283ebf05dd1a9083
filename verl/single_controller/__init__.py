"""One driver, many processes: workers, worker groups and how calls travel between them.

groups = build_worker_groups(backend, pool, {"actor_rollout": ClassWithInitArgs(..), "critic": ..})
groups["critic"].compute_values(batch)          # the same lines for all backends
for group in groups.values(): group.shutdown()  # the first one ends them all
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.single_controller.base import *  # noqa: F403  (users import these from here too)
    from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup


def build_worker_groups(
    backend: str, resource_pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs]
) -> dict[str, WorkerGroup]:
    """Build one group per role; all roles share the pool's processes, one worker of each per process.

    For roles on separate processes, call this once for each pool.

    Args:
        backend: "local" (this process; the pool must have one process) or "ray" (ray must be initialised; see
            verl.single_controller.ray.init_ray).
        resource_pool: the processes.
        roles: role -> worker class with its arguments.
    """
    from verl.single_controller.base import create_colocated_worker_cls

    colocated = create_colocated_worker_cls(roles)
    owner: WorkerGroup
    if backend == "local":
        from verl.single_controller.local import LocalWorkerGroup

        owner = LocalWorkerGroup(colocated, resource_pool)
    elif backend == "ray":
        from verl.single_controller.ray import RayWorkerGroup  # imports ray, which a local run does without

        owner = RayWorkerGroup(resource_pool, colocated)
    else:
        raise ValueError(f"backend is {backend!r}; it must be 'local' or 'ray'")
    return owner.spawn(list(roles))


def __getattr__(name: str) -> Any:
    """Provide the names of `base`, without torch for those who import a module of this package alone."""
    base = importlib.import_module("verl.single_controller.base")
    if name.startswith("_") or not hasattr(base, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(base, name)
