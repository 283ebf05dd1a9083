"""verl's import path of the Ray backend."""

from verl.single_controller.base.colocate import create_colocated_worker_cls
from verl.single_controller.ray.resource_pool import RayResourcePool
from verl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls"]
