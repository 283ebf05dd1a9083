"""LocalWorkerGroup: one rank inside the driver's process, behind the interface of the Ray backend.

Arguments and results pass by reference: the worker works on the driver's own tensors. A call runs when it is
made. `blocking=False` only wraps its result, and an error is raised by the call rather than by `get()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from verl.single_controller.base.decorator import Call
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    materialize,
    run_method,
)

_PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
_PLACE["RAY_LOCAL_WORLD_SIZE"] = "1"  # verl's name


class LocalWorkerGroup(WorkerGroup):
    """A worker group of world size 1, without a process group."""

    def __init__(self, cls_with_init: ClassWithInitArgs, resource_pool: ResourcePool | None = None) -> None:
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ValueError(
                f"the local backend runs one process, the pool asks for {resource_pool.world_size}; "
                "set trainer.backend=ray or trainer.nnodes=1 trainer.n_gpus_per_node=1"
            )
        super().__init__(world_size=1, worker_cls=cls_with_init.cls)
        before = {name: os.environ.get(name) for name in _PLACE}
        os.environ.update(_PLACE)
        try:
            self._worker: Worker | None = cls_with_init()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        """Run the call to its end in this process; return its result, which is its own handle."""
        if self._worker is None:
            raise RuntimeError(f"worker group {self.name!r} was shut down; {method} cannot run")
        return [run_method(self._worker, method, materialize(calls[0]))]

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return list

    def shutdown(self) -> None:
        worker = self._worker
        self._worker = None
        if worker is not None:
            worker.close()
