"""vLLM servers on GPUs of the cluster that nobody trains on: Ray shows a training process its own GPU alone.

    rank 0 of training -> RayServers -> an actor with `tensor_parallel_size` GPUs -> VllmServers of one server

A server listens on its node's address in the cluster, where whoever reaches it can pause it and change its
weights: the cluster's network has to be closed to others. It ends with its actor, and that with rank 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.ray.environment import carried_variables, import_path
from verl.workers.rollout.vllm.server import VllmServers

_SECONDS_TO_RESERVE = 60.0
_SECONDS_TO_CLOSE = 15.0


class ServerActor:
    """Holds the GPUs of one server, and the server."""

    def start(self, engine_args: dict[str, Any], python: str) -> str:
        """Return the server's address once it is healthy. The errors are those of `VllmServers`."""
        devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        address = ray.util.get_node_ip_address()  # in the cluster
        self.servers = VllmServers(engine_args, 1, python, devices, host=address)
        return self.servers.urls[0]

    def close(self) -> None:
        self.servers.close()


class RayServers:
    """As `VllmServers`, wherever the cluster has GPUs. python: an interpreter with vLLM, on every node.

    ValueError: there are not so many free GPUs. Errors of a server's start as of `VllmServers`.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], num_servers: int, python: str = sys.executable
    ) -> None:
        size = int(engine_args.get("tensor_parallel_size") or 1)
        share = {"CPU": 0.25, "GPU": float(size)}
        variables = carried_variables() | {"PYTHONPATH": import_path()}
        self.processes: list[Any] = []  # none of this machine
        self._actors: list[Any] = []
        self._place: PlacementGroup | None = placement_group([share] * num_servers)
        try:
            # Reserved before any process starts: to start one and to import can take minutes.
            if not self._place.wait(_SECONDS_TO_RESERVE):
                free = ray.available_resources()
                raise ValueError(
                    f"rollout.vllm.num_servers: no room for {num_servers} servers with {size} GPUs and a "
                    f"quarter of a CPU each, on one node, within {_SECONDS_TO_RESERVE:g} s; free in all: "
                    f"{free.get('GPU', 0.0):g} GPUs, {free.get('CPU', 0.0):g} CPUs. Train on fewer "
                    "(trainer.n_gpus_per_node, trainer.nnodes), or start fewer servers."
                )
            kind = ray.remote(ServerActor).options(
                num_cpus=share["CPU"],
                num_gpus=size,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._place),
                runtime_env={"env_vars": variables},
            )
            self._actors = [kind.remote() for _ in range(num_servers)]
            starting = [actor.start.remote(dict(engine_args), python) for actor in self._actors]
            self.urls: list[str] = ray.get(starting)
        except ray.exceptions.RayTaskError as error:
            self.close()
            raise error.cause from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all servers. It is safe to call this twice."""
        actors = self._actors
        self._actors = []
        closing = [actor.close.remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_SECONDS_TO_CLOSE)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        place = self._place
        self._place = None
        if place is not None:
            remove_placement_group(place)
