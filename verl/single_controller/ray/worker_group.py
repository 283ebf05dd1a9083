"""RayWorkerGroup: each rank is a Ray actor, in a process of its own.

    driver                              actor of rank i
    group.update(batch) -- chunk i ---> worker.update(chunk i)     ranks talk by torch.distributed
                        <-- result i --

A call that fails raises the worker's own exception here, caused by a WorkerFailedError with the rank and the
remote traceback. A process that died raises WorkerDiedError; nothing is tried again, since a new process
would have lost its state: shut the group down and build it anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base.decorator import Call
from verl.single_controller.base.worker import Worker, get_free_port
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup, materialize
from verl.single_controller.ray.resource_pool import RayResourcePool

_SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
_SECONDS_TO_CLOSE = 5.0


class WorkerFailedError(RuntimeError):
    """Which rank raised, and its traceback; the cause of the exception that is raised."""


class WorkerDiedError(RuntimeError):
    """The process of a rank ended in the middle of a call, or before it."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """As its base; a class decorated by `ray.remote` is taken too, and used as the plain class it was."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        plain = cls.__ray_metadata__.modified_class.__ray_actor_class__ if _is_actor_class(cls) else cls
        super().__init__(plain, *args, **kwargs)


def _is_actor_class(cls: Any) -> bool:
    return isinstance(cls, ray.actor.ActorClass)


class RankProcess:
    """The actor: makes the worker and runs its methods, one at a time, in the order they were called."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def find_rendezvous(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), get_free_port()

    def make_worker(self, cls_with_init: ClassWithInitArgs, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        self.worker = cls_with_init()

    def run(self, method: str, call: Call) -> Any:
        args, kwargs = materialize(call)
        return getattr(self.worker, method)(*args, **kwargs)


class RayWorkerGroup(WorkerGroup):
    """A worker class on every process of a pool."""

    def __init__(self, resource_pool: ResourcePool, ray_cls_with_init: ClassWithInitArgs) -> None:
        super().__init__(resource_pool.world_size, ray_cls_with_init.cls)
        if not isinstance(resource_pool, RayResourcePool):
            resource_pool = RayResourcePool(resource_pool.process_on_nodes, resource_pool.use_gpu)
        self._actors: list[Any] = []
        place = resource_pool.create_placement_group()
        self._placement_group: PlacementGroup | None = place
        try:
            self._actors = self._create_actors(resource_pool, place)
            self._make_workers(resource_pool, ray_cls_with_init)
        except BaseException:  # also an interrupt: no process may stay behind
            self.shutdown()
            raise

    def _create_actors(self, pool: RayResourcePool, place: PlacementGroup) -> list[Any]:
        actors = []
        for node, _ in pool.places:
            strategy = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=node)
            actor_cls = ray.remote(RankProcess).options(
                num_cpus=pool.num_cpus_per_process,
                num_gpus=1 if pool.use_gpu else 0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {"PYTHONPATH": _import_path()} | _thread_settings(pool)},
            )
            actors.append(actor_cls.remote())
        return actors

    def _make_workers(self, pool: RayResourcePool, cls_with_init: ClassWithInitArgs) -> None:
        address, port = self._resolve_all([self._actors[0].find_rendezvous.remote()], "its start")[0]
        refs = []
        for rank, (actor, (node, local_rank)) in enumerate(zip(self._actors, pool.places, strict=True)):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(pool.world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(pool.process_on_nodes[node]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            refs.append(actor.make_worker.remote(cls_with_init, variables))
        self._resolve_all(refs, "__init__")

    def _resolve_all(self, refs: list[Any], method: str) -> list[Any]:
        return resolve_refs(refs, self.name, method)

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        if not self._actors:
            raise RuntimeError(f"worker group {self.name!r} was shut down; {method} cannot run")
        return [actor.run.remote(method, call) for actor, call in zip(self._actors, calls, strict=False)]

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return partial(resolve_refs, group=self.name, method=method)

    def shutdown(self) -> None:
        """Lets each worker close (a few seconds at most), then ends the processes and frees their places."""
        actors, self._actors = self._actors, []
        place, self._placement_group = self._placement_group, None
        if not ray.is_initialized():  # the session ended first, and the actors with it
            return
        if actors:
            closing = [actor.run.remote("close", ((), {})) for actor in actors]
            ray.wait(closing, num_returns=len(closing), timeout=_SECONDS_TO_CLOSE)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if place is not None:
            remove_placement_group(place)


def _thread_settings(pool: RayResourcePool) -> dict[str, str]:
    """One thread per CPU process: with more busy threads than cores they are 3 to 5 times slower."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if not pool.use_gpu and max(pool.process_on_nodes) > 1:
        return {"OMP_NUM_THREADS": threads or "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return {"OMP_NUM_THREADS": threads} if threads else {}


def _import_path() -> str:
    """The folders beside Python's own from which the driver imports: actors find the same modules."""
    own = (sys.prefix, sys.base_prefix)
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path if not folder.startswith(own))


def resolve_refs(refs: list[Any], group: str, method: str) -> list[Any]:
    """The values of one call's object references, one per rank; raises at the first error of any rank."""
    pending = list(refs)
    values: dict[Any, Any] = {}
    errors: dict[Any, Exception] = {}
    while pending and not errors:
        ready, pending = ray.wait(pending, num_returns=1)
        _fetch(ready, values, errors)
    if errors:
        if pending:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_SECONDS_FOR_OTHER_RANKS)
            _fetch(ready, values, errors)
        rank = min((refs.index(ref) for ref in errors), key=lambda r: not _is_death(errors[refs[r]]))
        _raise_error(errors[refs[rank]], f"rank {rank} of worker group {group!r}", method)
    return [values[ref] for ref in refs]


def _fetch(ready: list[Any], values: dict[Any, Any], errors: dict[Any, Exception]) -> None:
    for ref in ready:
        try:
            values[ref] = ray.get(ref)
        except Exception as error:  # whatever a worker's method may raise; raised again by the caller
            errors[ref] = error


def _is_death(error: Exception) -> bool:
    return isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError | WorkerDiedError)


def _raise_error(error: Exception, where: str, method: str) -> None:
    if _is_death(error) and not isinstance(error, WorkerDiedError):
        raise WorkerDiedError(f"{where} died during {method}: {error}") from error
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        raise error.cause from WorkerFailedError(f"{where} failed in {method}:\n{error}")
    raise error
