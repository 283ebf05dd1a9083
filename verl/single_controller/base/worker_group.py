"""WorkerGroup: the processes of one job, which the driver sees as one object with the worker's methods.

    group.compute_values(batch)
      -> dispatch: one (args, kwargs) per rank -> each rank runs the method -> collect: one result

A backend (local.py, ray/) says in `_start` how a rank runs a call, and in `_resolver` how to get
the call's value.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import (
    REGISTRATION_ATTRIBUTE,
    Call,
    DataPosition,
    Execute,
    Registration,
    dispatch_call,
    per_rank_calls,
    registered_methods,
)
from verl.single_controller.base.worker import Worker
from verl.single_controller.names import RunNames

# What gloo and NCCL say when a peer has gone.
PEER_GONE = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|connection was likely closed"
    r"|remote process exited|connectFullMesh|ncclRemoteError|NCCL communicator was aborted|socket timeout",
    re.IGNORECASE,
)


class WorkerFailedError(RuntimeError):
    """An error that says which rank raised, with its traceback; the cause of the exception that is raised."""


class WorkerDiedError(RuntimeError):
    """An error of a rank whose process or node is gone, in the middle of a call or before it.

    The state of the rank is lost, so nothing is tried again. Shut the group down and build it anew.
    """


class ConnectionLostError(WorkerDiedError):
    """An error of a rank that lost its connection to another one, while it is not known which one is gone."""


class ClassWithInitArgs:
    """A Worker class and the arguments with which to make a worker, later and elsewhere."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"a Worker class is needed (a plain one, without ray.remote), got {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        return self.cls(*self.args, **self.kwargs)


class ResourcePool:
    """The number of processes on each node, whether each has a GPU of its own, and their names on Ray."""

    def __init__(self, process_on_nodes: Sequence[int], use_gpu: bool = False) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(
                f"process_on_nodes is {process_on_nodes}; at least one process per node is needed"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.use_gpu = use_gpu
        self.timeout_seconds = 60.0  # how long a worker group waits until the cluster has room
        self.names: RunNames | None = None  # of the run; None for processes without names
        self.role = ""  # what its processes do for the run: "trainer" gives "trainer-0", "trainer-1", ...

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return sum(self.process_on_nodes)

    @property
    def rank_positions(self) -> list[tuple[int, int]]:
        """Return (node, rank on that node) of each rank."""
        return [(node, local) for node, count in enumerate(self.process_on_nodes) for local in range(count)]

    def variables(self, address: str, port: int) -> list[dict[str, str]]:
        """Return the environment variables of each rank's `Worker`.

        Args:
            address: address of the store in which the ranks meet.
            port: port of that store.
        """
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        environments = []
        for rank, (node, local_rank) in enumerate(self.rank_positions):
            numbers = {"RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": local_rank}
            numbers["LOCAL_WORLD_SIZE"] = self.process_on_nodes[node]
            numbers["RAY_LOCAL_WORLD_SIZE"] = self.process_on_nodes[node]  # verl's name for the same
            environments.append(meeting | {name: str(number) for name, number in numbers.items()})
        return environments


class WorkerGroup:
    """The driver's handle on the ranks of one worker class, with its registered methods as attributes."""

    def __init__(self, world_size: int, worker_cls: type[Worker], name: str = "", prefix: str = "") -> None:
        self.world_size = world_size
        self.worker_cls = worker_cls
        self.name = name or worker_cls.__name__
        self._prefix = prefix
        self._mesh_positions: dict[str, list[DataPosition]] = {}
        self._method_names: list[str] = []
        self._bind_worker_method(worker_cls, prefix)

    def __getattr__(self, name: str) -> Any:  # reached only if there is no such attribute
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"worker group {self.name!r} has no method {name!r}; there are {self._method_names}"
        )

    def _bind_worker_method(self, worker_cls: type[Worker], prefix: str = "") -> None:
        """Give this group the registered methods of a class; the ranks know them as prefix + name."""
        for name, registration in registered_methods(worker_cls).items():
            if hasattr(self, name):
                raise ValueError(
                    f"{worker_cls.__name__}.{name} cannot be registered: a worker group uses that name"
                )
            setattr(self, name, self._bound(prefix + name, registration))
            self._method_names.append(name)

    def _bound(self, method: str, registration: Registration) -> Callable[..., Any]:
        """Return the function that the driver calls: it dispatches, runs ranks and joins their results."""
        rank_zero = registration.execute_mode is Execute.RANK_ZERO

        def call(*args: Any, **kwargs: Any) -> Any:
            dispatched = dispatch_call(registration.dispatch_mode, self, args, kwargs)
            calls = dispatched.calls
            collect = dispatched.collect
            if rank_zero:
                calls = calls[:1]
                collect = itemgetter(0)
            future = DataProtoFuture(self._start(method, calls), self._resolver(method), collect)
            return future.get() if registration.blocking else future

        call.__name__ = method
        return call

    @cached_property
    def data_positions(self) -> list[DataPosition]:
        """Return each rank's position among the replicas of the model, asked once when first needed."""
        positions: list[DataPosition] = self.data_position()
        return positions

    @property
    def dp_size(self) -> int:
        """Return the number of replicas of the model, each of which works on rows of its own."""
        return self.data_positions[0].size

    def mesh_positions(self, mesh_name: str) -> list[DataPosition]:
        """Return each rank's position in a mesh that the workers have registered, asked once per mesh."""
        if mesh_name not in self._mesh_positions:
            ranks = self.mesh_rank(mesh_name)
            size = 1 + max(rank for rank, _ in ranks)
            self._mesh_positions[mesh_name] = [DataPosition(rank, size, leads) for rank, leads in ranks]
        return self._mesh_positions[mesh_name]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start any method of the workers on every rank; return one handle per rank.

        As in verl, arguments go to all ranks, unless each of them is a list with one entry per rank.
        """
        values = [*args, *kwargs.values()]
        if values and all(isinstance(value, list) and len(value) == self.world_size for value in values):
            calls = per_rank_calls(args, kwargs, self.world_size)
        else:
            calls = [(args, kwargs)] * self.world_size
        return self._start(self._prefix + method_name, calls)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run any method of the workers on every rank, and return what each rank returns.

        Arguments are those of `execute_all_async`.
        """
        handles = self.execute_all_async(method_name, *args, **kwargs)
        return self._resolver(self._prefix + method_name)(handles)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the workers on rank 0, and return what that returns."""
        name = self._prefix + method_name
        return self._resolver(name)(self._start(name, [(args, kwargs)]))[0]

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        """Start call i on rank i; return one handle per call."""
        raise NotImplementedError

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        """Return a picklable function from handles to values."""
        raise NotImplementedError

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return a group for each of these roles of a colocated worker class, over the same processes."""
        roles = list(prefix_set)
        unknown = [role for role in roles if role not in self.worker_cls.role_classes]
        if unknown:
            raise ValueError(
                f"no roles {unknown} in {self.name!r}; there are {list(self.worker_cls.role_classes)}"
            )
        return {role: RoleGroup(self, role) for role in roles}

    def shutdown(self) -> None:
        """End the ranks, of all roles if they are colocated; a second call does nothing."""
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
    """Return what stands before the name of a role's method in a colocated class."""
    return f"{role}_"


def materialize(call: Call) -> Call:
    """Return the call with each DataProtoFuture argument replaced by its value."""

    def value(argument: Any) -> Any:
        return argument.get() if isinstance(argument, DataProtoFuture) else argument

    args, kwargs = call
    return tuple(map(value, args)), {key: value(argument) for key, argument in kwargs.items()}


def run_method(worker: Worker, method: str, call: Call) -> Any:
    """Run a method of a worker in its process, an `async def` method to its end."""
    args, kwargs = call
    result = getattr(worker, method)(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


class ColocatedWorker(Worker):
    """One worker per role, made in the order given, in one process; see `create_colocated_worker_cls`."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__()
        self.workers = {role: cls_with_init() for role, cls_with_init in roles.items()}

    def close(self) -> None:
        """Close the workers, the last one first."""
        for worker in reversed(self.workers.values()):
            worker.close()


def _forward(role: str, name: str) -> Callable[..., Any]:
    def method(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.workers[role], name)(*args, **kwargs)

    return method


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """Return a worker class that holds one worker of each role, with its arguments.

    {"actor": ClassWithInitArgs(A, ..), "critic": ClassWithInitArgs(C, ..)} becomes a class with the methods
    actor_update, critic_update, ... The method `spawn(["actor", "critic"])` of a group over it returns one
    group for each role, with the methods' own names.
    """
    if not class_dict:
        raise ValueError("at least one role is needed")
    namespace: dict[str, Any] = {"role_classes": {role: item.cls for role, item in class_dict.items()}}
    for role, item in class_dict.items():
        for name, registration in registered_methods(item.cls).items():
            full_name = method_prefix(role) + name
            if full_name in namespace:
                raise ValueError(
                    f"two roles of {list(class_dict)} have a method {full_name!r}; rename a role"
                )
            namespace[full_name] = _forward(role, name)
            setattr(namespace[full_name], REGISTRATION_ATTRIBUTE, registration)
    cls = type(f"Colocated_{'_'.join(class_dict)}", (ColocatedWorker,), namespace)
    return ClassWithInitArgs(cls, dict(class_dict))
