"""A worker group of several ranks in this process, whose columns over tokens stay outside of the driver's
batch as they do with Ray: calls and results go through `object_store` and through pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerGroup
from verl.single_controller.base.worker import environment
from verl.single_controller.ray import object_store


class StoringGroup(WorkerGroup):
    """`columns_stay=False`: results come whole, as they do without a flag."""

    def __init__(self, item: ClassWithInitArgs, world_size: int, columns_stay: bool = True) -> None:
        super().__init__(world_size, item.cls)
        self.columns_stay = columns_stay
        self.store: dict[Any, Any] = {}
        self.workers: list[Worker] = []
        for rank in range(world_size):
            with environment({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}):
                self.workers.append(item())

    def _start(self, method: str, calls: list[Any]) -> list[Any]:
        return [self._run(worker, method, call) for worker, call in zip(self.workers, calls, strict=True)]

    def _run(self, worker: Worker, method: str, call: Any) -> Any:
        detached, references = object_store.detach(call)
        for value in (*detached[0], *detached[1].values()):
            assert not self.columns_stay or not has_token_columns(value)
        args, kwargs = object_store.attach(
            pickle.loads(pickle.dumps(detached)), tuple(reference.content for reference in references)
        )
        result = getattr(worker, method)(*args, **kwargs)
        if not self.columns_stay:
            return pickle.loads(pickle.dumps(result))
        small, columns = object_store.split(result)
        return pickle.loads(pickle.dumps(small)), Reference(columns)

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return partial(object_store.resolve_apart, resolve=list) if self.columns_stay else list

    def shutdown(self) -> None:
        pass


class Reference:
    """Stands where Ray's reference to an object does."""

    def __init__(self, content: Any) -> None:
        self.content = content


def has_token_columns(value: Any) -> bool:
    if not isinstance(value, DataProto) or value.batch is None:
        return False
    return any(tensor.dim() > 1 for tensor in value.batch.values())
