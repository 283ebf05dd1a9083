"""One driver, many processes: workers, worker groups and how calls travel between them."""

from verl.single_controller.base import (
    ClassWithInitArgs,
    DataPosition,
    Dispatch,
    Execute,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    register,
)
from verl.single_controller.factory import build_worker_groups

__all__ = [
    "ClassWithInitArgs",
    "DataPosition",
    "Dispatch",
    "Execute",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "build_worker_groups",
    "create_colocated_worker_cls",
    "register",
]
