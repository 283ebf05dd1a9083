"""WorkerGroup: the processes of one job, seen from the driver as one object with the worker's methods.

    group.compute_values(batch)
      -> dispatch: one (args, kwargs) per rank -> each rank runs the method -> collect: one result

A backend (local/, ray/) says in `_start` how a rank runs a call and in `_resolver` how its value is had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import (
    Call,
    DataPosition,
    Execute,
    Registration,
    get_dispatch_mode,
    registered_methods,
)
from verl.single_controller.base.worker import Worker


class ClassWithInitArgs:
    """A Worker class and the arguments to make it with, later and elsewhere."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"a Worker class is needed (a plain one, without ray.remote), got {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        return self.cls(*self.args, **self.kwargs)


class ResourcePool:
    """How many processes run on each node, and whether each has a GPU of its own."""

    def __init__(self, process_on_nodes: Sequence[int], use_gpu: bool = False) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(
                f"process_on_nodes is {process_on_nodes}; at least one process per node is needed"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.use_gpu = use_gpu

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(node, rank on that node) of each rank."""
        return [(node, local) for node, count in enumerate(self.process_on_nodes) for local in range(count)]


class WorkerGroup:
    """The driver's handle on the ranks of one worker class; holds its registered methods as attributes."""

    def __init__(self, world_size: int, worker_cls: type[Worker], name: str = "", prefix: str = "") -> None:
        self.world_size = world_size
        self.worker_cls = worker_cls
        self.name = name or worker_cls.__name__
        self._method_names: list[str] = []
        self._bind_worker_method(worker_cls, prefix)

    def __getattr__(self, name: str) -> Any:  # reached only if there is no such attribute
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"worker group {self.name!r} has no method {name!r}; there are {self._method_names}"
        )

    def _bind_worker_method(self, worker_cls: type[Worker], prefix: str = "") -> None:
        """Gives this group the registered methods of a class; the ranks know them as prefix + name."""
        for name, registration in registered_methods(worker_cls).items():
            if hasattr(self, name):
                raise ValueError(
                    f"{worker_cls.__name__}.{name} cannot be registered: a worker group uses that name"
                )
            setattr(self, name, self._bound(prefix + name, registration))
            self._method_names.append(name)

    def _bound(self, method: str, registration: Registration) -> Callable[..., Any]:
        mode = get_dispatch_mode(registration.dispatch_mode)
        rank_zero = registration.execute_mode is Execute.RANK_ZERO
        every_rank = DataPosition.of_ranks(self.world_size)

        def call(*args: Any, **kwargs: Any) -> Any:
            positions = self.data_positions if mode.by_replica else every_rank
            dispatched = mode.dispatch(positions, args, kwargs)
            calls, collect = dispatched.calls, dispatched.collect
            if rank_zero:
                calls, collect = calls[:1], _only
            future = DataProtoFuture(self._start(method, calls), self._resolver(method), collect)
            return future.get() if registration.blocking else future

        call.__name__ = method
        return call

    @cached_property
    def data_positions(self) -> list[DataPosition]:
        """Where each rank stands among the replicas of the model; asked once, when it is first needed."""
        positions: list[DataPosition] = self.data_position()
        return positions

    @property
    def dp_size(self) -> int:
        """Replicas of the model, each of which works on rows of its own."""
        return self.data_positions[0].size

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        """Starts call i on rank i; returns one handle per call."""
        raise NotImplementedError

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        """A picklable function from handles to values."""
        raise NotImplementedError

    def spawn(self, roles: Sequence[str]) -> dict[str, WorkerGroup]:
        """A group for each role of a colocated worker class, over the same processes."""
        unknown = [role for role in roles if role not in self.worker_cls.role_classes]
        if unknown:
            raise ValueError(
                f"no roles {unknown} in {self.name!r}; there are {list(self.worker_cls.role_classes)}"
            )
        return {role: RoleGroup(self, role) for role in roles}

    def shutdown(self) -> None:
        """Ends the ranks, of all roles if they are colocated. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class RoleGroup(WorkerGroup):
    """One role of a group of colocated workers; `shutdown` ends all its roles."""

    def __init__(self, owner: WorkerGroup, role: str) -> None:
        super().__init__(owner.world_size, owner.worker_cls.role_classes[role], role, method_prefix(role))
        self.owner = owner

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        return self.owner._start(method, calls)

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return self.owner._resolver(method)

    def shutdown(self) -> None:
        self.owner.shutdown()


def method_prefix(role: str) -> str:
    """What stands before the name of a role's method in a colocated class."""
    return f"{role}_"


def materialize(call: Call) -> Call:
    """The call with each DataProtoFuture argument replaced by its value."""

    def value(argument: Any) -> Any:
        return argument.get() if isinstance(argument, DataProtoFuture) else argument

    args, kwargs = call
    return tuple(map(value, args)), {key: value(argument) for key, argument in kwargs.items()}


def _only(outputs: list[Any]) -> Any:
    return outputs[0]
