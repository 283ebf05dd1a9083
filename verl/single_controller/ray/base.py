"""RayWorkerGroup, whose ranks are Ray actors, each in its own process, and RayResourcePool, their place.

    driver                              actor of rank i
    group.update(batch) -- chunk i ---> worker.update(chunk i)     ranks talk by torch.distributed
                        <-- result i --

A call that fails raises the worker's own exception here, caused by a WorkerFailedError with the rank and the
remote traceback. A process that died raises WorkerDiedError, which names it (failures.py). Nothing is tried
again, since a new process would have lost its state: shut the group down and build it anew
(verl/trainer/restarts.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore

from verl.single_controller.base import create_colocated_worker_cls as create_colocated_worker_cls
from verl.single_controller.base.decorator import Call
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    materialize,
    run_method,
)
from verl.single_controller.ray.deaths import ProcessPlace
from verl.single_controller.ray.environment import (
    DRIVER_ONLY,
    PROCESS_NAME,
    SECRETS,
    carried_variables,
    collective_variables,
    import_path,
    secret_variables,
)
from verl.single_controller.ray.failures import resolve_refs
from verl.single_controller.ray.session import wait_until_free
from verl.utils.logs import set_level

_SECONDS_TO_CLOSE = 5.0
_SECONDS_TO_WAIT_SILENTLY = 5.0  # how long to wait for room in the cluster before a line says so


class RayResourcePool(ResourcePool):
    """A pool of `process_on_nodes[i]` processes on the i-th of as many different nodes.

    With `strategy="PACK"` the nodes need not be different: processes go where there is room, close together.
    Each process reserves `num_cpus_per_process` of Ray's CPU count (a share, so that a machine of two cores
    can host several) and, with `use_gpu`, `gpus_per_process` GPUs of its own. `name_prefix` and
    `max_colocate_count` are verl's and have no effect.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        *,
        num_cpus_per_process: float = 0.25,
        gpus_per_process: int = 1,
        strategy: str = "STRICT_SPREAD",
    ) -> None:
        super().__init__(process_on_nodes, use_gpu)
        self.strategy = strategy
        self.num_cpus_per_process = num_cpus_per_process
        self.gpus_per_process = gpus_per_process if use_gpu else 0

    def create_placement_group(self) -> PlacementGroup:
        """Reserve one bundle per entry of `process_on_nodes`.

        Raises ValueError if the cluster has no room within the timeout.
        """
        bundles = [{"CPU": self.num_cpus_per_process * count} for count in self.process_on_nodes]
        if self.gpus_per_process:
            for bundle, count in zip(bundles, self.process_on_nodes, strict=True):
                bundle["GPU"] = float(count * self.gpus_per_process)
        group = placement_group(bundles, strategy=self.strategy)
        demand = f"one node each with {bundles}"
        if self.strategy != "STRICT_SPREAD":
            demand = f"room for each of {bundles}"
        if group.wait(min(_SECONDS_TO_WAIT_SILENTLY, self.timeout_seconds)):
            return group
        print(f"waiting up to {self.timeout_seconds:g} s until the Ray cluster has {demand}", flush=True)
        if not group.wait(max(self.timeout_seconds - _SECONDS_TO_WAIT_SILENTLY, 0.0)):
            remove_placement_group(group)
            free = {key: amount for key, amount in ray.available_resources().items() if key in ("CPU", "GPU")}
            num_nodes = sum(node["Alive"] for node in ray.nodes())
            raise ValueError(
                f"no room in the Ray cluster after {self.timeout_seconds:g} s: the run needs {demand}, and "
                f"there are {num_nodes} nodes with {free} free in all. Lower trainer.n_gpus_per_node or "
                "trainer.nnodes (for rollouts apart: rollout.num_processes), end what holds the rest, or let "
                "others join (scripts/ray_node.sh)."
            )
        return group


class RayClassWithInitArgs(ClassWithInitArgs):
    """A Worker class with its arguments, which may be decorated by `ray.remote`.

    A decorated class is used as the plain class that it was.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        is_actor_class = isinstance(cls, ray.actor.ActorClass)
        plain = cls.__ray_metadata__.modified_class.__ray_actor_class__ if is_actor_class else cls
        super().__init__(plain, *args, **kwargs)


class RankProcess:
    """The actor, which makes the worker and runs its methods, one at a time, in the order of the calls.

    Args:
        name: the name before the lines that it writes, such as "trainer-0".
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def locate(self) -> ProcessPlace:
        """Return where this rank lives, and start its store; all ranks meet in the store of rank 0.

        The system picks the port of the store.
        """
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return ProcessPlace.here(self.store.port)

    def make_worker(
        self, cls_with_init: ClassWithInitArgs, variables: dict[str, str], several_nodes: bool
    ) -> None:
        for name in DRIVER_ONLY:
            os.environ.pop(name, None)
        os.environ.update(variables)
        if several_nodes:
            os.environ.update(collective_variables(ray.util.get_node_ip_address()))
        set_level()
        self.worker = cls_with_init()

    def run(self, method: str, call: Call) -> Any:
        return run_method(self.worker, method, materialize(call))


class RayWorkerGroup(WorkerGroup):
    """A worker class on every process of a pool.

    Args:
        resource_pool: the processes; a plain pool is taken as a `RayResourcePool`. Where it has `names`, its
            processes are named actors, such as "<experiment>/trainer-0".
        ray_cls_with_init: the worker class with its arguments.
        name_prefix: the group's name in messages, for processes without names.
        device_name: has no effect; the pool says what the device is.
        worker_env: environment variables for each process, set before its Python starts. They go before those
            that are carried from the driver.

    Raises ValueError if `worker_env` has a variable that the group sets itself, such as RANK.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str | None = None,
        device_name: str = "",
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        self._worker_env = dict(worker_env or {})
        protected = sorted({*self._worker_env} & ({*resource_pool.variables("", 0)[0]} | {PROCESS_NAME}))
        if protected:
            raise ValueError(f"worker_env: found {', '.join(protected)}, which the group sets; leave it out.")
        super().__init__(resource_pool.world_size, ray_cls_with_init.cls, name_prefix or "")
        self._names = resource_pool.names
        if self._names is None:
            self._who = [f"rank {rank} of worker group {self.name!r}" for rank in range(self.world_size)]
        else:
            self._who = [f"{resource_pool.role}-{rank}" for rank in range(self.world_size)]
        if not isinstance(resource_pool, RayResourcePool):
            resource_pool = RayResourcePool(resource_pool.process_on_nodes, resource_pool.use_gpu)
        self._actors: list[Any] = []
        self._rank_places: list[ProcessPlace] = []
        placement = resource_pool.create_placement_group()
        self._placement_group: PlacementGroup | None = placement
        try:
            self._actors = self._create_actors(resource_pool, placement)
            self._make_workers(resource_pool, ray_cls_with_init)
        except BaseException:  # also an interrupt: no process may stay behind
            self.shutdown()
            raise

    def _create_actors(self, pool: RayResourcePool, place: PlacementGroup) -> list[Any]:
        actors = []
        common = {"PYTHONPATH": import_path()} | carried_variables() | _thread_settings(pool)
        common |= {name: x for name, x in self._worker_env.items() if not SECRETS.fullmatch(name)}
        if self._names is not None:
            wait_until_free(self._names.namespace, [self._names.full(who) for who in self._who])
        for rank, (node, _) in enumerate(pool.rank_positions):
            strategy = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=node)
            naming: dict[str, Any] = {}
            variables = dict(common)
            if self._names is not None:
                full_name = self._names.full(self._who[rank])
                naming = {"name": full_name, "namespace": self._names.namespace}
                variables[PROCESS_NAME] = full_name
            actor_cls = ray.remote(RankProcess).options(
                num_cpus=pool.num_cpus_per_process,
                num_gpus=pool.gpus_per_process,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": variables},
                **naming,
            )
            actors.append(actor_cls.remote(self._who[rank]))
        return actors

    def _make_workers(self, pool: RayResourcePool, cls_with_init: ClassWithInitArgs) -> None:
        self._rank_places = self._resolver("its start")([actor.locate.remote() for actor in self._actors])
        several_nodes = len({place.node for place in self._rank_places}) > 1
        first = self._rank_places[0]
        environments = pool.variables(first.address, first.port)
        given = secret_variables() | self._worker_env
        refs = []
        for actor, variables in zip(self._actors, environments, strict=True):
            refs.append(actor.make_worker.remote(cls_with_init, given | variables, several_nodes))
        self._resolver("__init__")(refs)

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        if not self._actors:
            raise RuntimeError(f"worker group {self.name!r} was shut down; {method} cannot run")
        return [actor.run.remote(method, call) for actor, call in zip(self._actors, calls, strict=False)]

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return partial(resolve_refs, who=self._who, method=method, places=self._rank_places)

    def shutdown(self) -> None:
        """Let each worker close (a few seconds at most), then end the processes and free their places."""
        actors = self._actors
        self._actors = []
        placement = self._placement_group
        self._placement_group = None
        if not ray.is_initialized():  # the session ended first, and the actors with it
            return
        if actors:
            closing = [actor.run.remote("close", ((), {})) for actor in actors]
            ray.wait(closing, num_returns=len(closing), timeout=_SECONDS_TO_CLOSE)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if placement is not None:
            remove_placement_group(placement)


def _thread_settings(pool: RayResourcePool) -> dict[str, str]:
    """Return variables for one thread per CPU process.

    With more busy threads than cores, processes are 3 to 5 times slower.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    may_share_a_node = max(pool.process_on_nodes) > 1 or (
        pool.strategy != "STRICT_SPREAD" and pool.world_size > 1
    )
    if not pool.use_gpu and may_share_a_node:
        return {"OMP_NUM_THREADS": threads or "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return {"OMP_NUM_THREADS": threads} if threads else {}
