"""The Ray backend; importing it imports ray, after its settings (environment.py) have been made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl.single_controller.ray.session import RaySession, init_ray

if TYPE_CHECKING:
    from verl.single_controller.base import create_colocated_worker_cls
    from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RaySession", "RayWorkerGroup", "init_ray"]
__all__ += ["create_colocated_worker_cls"]


def __getattr__(name: str) -> Any:
    """Provide the names of `base`, without torch for those who only start Ray."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("verl.single_controller.ray.base"), name)
