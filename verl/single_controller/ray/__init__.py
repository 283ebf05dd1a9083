"""The Ray backend; importing it imports ray, after its settings (environment.py) have been made."""

from verl.single_controller.base import create_colocated_worker_cls
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.session import RaySession, init_ray

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RaySession", "RayWorkerGroup", "init_ray"]
__all__ += ["create_colocated_worker_cls"]
