"""The Ray backend. Importing it imports ray, after its settings (environment.py) have been made."""

from verl.single_controller.base import WorkerDiedError, WorkerFailedError
from verl.single_controller.base.colocate import create_colocated_worker_cls
from verl.single_controller.ray.environment import RAY_SETTINGS
from verl.single_controller.ray.resource_pool import RayResourcePool
from verl.single_controller.ray.session import RaySession, init_ray
from verl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

__all__ = [
    "RAY_SETTINGS",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RaySession",
    "RayWorkerGroup",
    "WorkerDiedError",
    "WorkerFailedError",
    "create_colocated_worker_cls",
    "init_ray",
]
