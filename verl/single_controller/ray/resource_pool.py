"""RayResourcePool: where in a Ray cluster the processes of a worker group go.

With GPUs: on nodes that have as many free ones. Without: on nodes that have no GPUs at all, if the cluster
has enough of them, so that a run on CPUs does not take the CPUs of those that train on GPUs. Whether nodes
have enough in all is `missing_room`; whether other runs hold it, the reservation finds out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool

_SECONDS_BETWEEN_LOOKS = 1.0
_NODE_ID = "ray.io/node-id"  # a label that Ray gives each node


class RayResourcePool(ResourcePool):
    """`process_on_nodes[i]` processes on the i-th of as many different nodes.

    Each process reserves `num_cpus_per_process` of Ray's CPU count (a share, so that a machine of two cores
    can host several) and, with `use_gpu`, one GPU of its own.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        num_cpus_per_process: float = 0.25,
        *,
        name_prefix: str = "",
        max_colocate_count: int = 1,
    ) -> None:
        """`name_prefix` and `max_colocate_count` are verl's and change nothing: pools need no name, and each
        worker group reserves its own places.
        """
        super().__init__(process_on_nodes, use_gpu)
        self.num_cpus_per_process = num_cpus_per_process

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each of the pool's nodes must have."""
        cpus = ({"CPU": self.num_cpus_per_process * count} for count in self.process_on_nodes)
        if not self.use_gpu:
            return list(cpus)
        return [b | {"GPU": float(n)} for b, n in zip(cpus, self.process_on_nodes, strict=True)]

    def create_placement_group(self, timeout_seconds: float = 60.0) -> PlacementGroup:
        """Reserves one bundle per node. ValueError if the cluster has no room within the timeout."""
        bundles = self.bundles
        nodes = None if self.use_gpu else cpu_only_nodes([b["CPU"] for b in bundles], ray.nodes())
        selectors = [{_NODE_ID: f"in({','.join(nodes)})"}] * len(bundles) if nodes else None
        group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=selectors)
        if not group.wait(timeout_seconds):
            remove_placement_group(group)
            free = {key: n for key, n in ray.available_resources().items() if key in ("CPU", "GPU")}
            num_nodes = sum(node["Alive"] for node in ray.nodes())
            raise ValueError(
                f"no room in the Ray cluster after {timeout_seconds:.0f} s: asked for one node each with "
                f"{bundles}, found {num_nodes} nodes with {free} free in all; lower trainer.n_gpus_per_node "
                "or trainer.nnodes, or end what holds the rest"
            )
        return group


def cpu_only_nodes(cpus: Sequence[float], nodes: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Ids of the nodes to choose among for processes without GPUs; None: any.

    Args:
        cpus: what is needed on as many different nodes.
        nodes: of the cluster, as `ray.nodes()` describes them.
    """
    alive = [node for node in nodes if node["Alive"]]
    without = [node for node in alive if not node["Resources"].get("GPU")]
    if len(without) == len(alive):
        return None  # all alike
    most = max(cpus)
    able = [node["Labels"][_NODE_ID] for node in without if node["Resources"].get("CPU", 0.0) >= most]
    return able if len(able) >= len(cpus) else None


def missing_room(pools: Sequence[list[dict[str, float]]], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What nodes lack for the pools, in words; None if there is room.

    Args:
        pools: bundles of each pool. A pool's bundles are on different nodes; pools may share nodes.
        nodes: resources of each node that is there.
    """
    free = [dict(node) for node in nodes]
    lacking = []
    for pool in pools:
        taken: set[int] = set()
        for bundle in sorted(pool, key=_gpus_and_cpus, reverse=True):
            fitting = [
                index
                for index, left in enumerate(free)
                if index not in taken and all(left.get(name, 0.0) >= count for name, count in bundle.items())
            ]
            if not fitting:
                lacking.append(bundle)
                continue
            best = min(fitting, key=lambda index: _gpus_and_cpus(free[index]))
            taken.add(best)
            free[best] |= {name: free[best].get(name, 0.0) - count for name, count in bundle.items()}
    if not lacking:
        return None
    wanted = ", ".join(sorted({_in_words(bundle) for bundle in lacking}))
    there = "; ".join(_in_words(node) for node in nodes) or "none"
    count = f"{len(lacking)} node{'s' if len(lacking) > 1 else ''}"
    return f"{count} with {wanted} free (nodes that are there: {there})"


def _gpus_and_cpus(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("GPU", 0.0), resources.get("CPU", 0.0)


def _in_words(resources: Mapping[str, float]) -> str:
    gpus, cpus = _gpus_and_cpus(resources)
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def wait_for_room(pools: Sequence[RayResourcePool], timeout_seconds: float, why: str) -> str | None:
    """Waits until the cluster has the nodes that the pools need, saying what is missing when that changes.

    Args:
        why: ends the line that says it, e.g. the setting that gives the time.

    Returns:
        What it lacks still at the end.
    """
    end, said = time.monotonic() + timeout_seconds, None
    bundles = [pool.bundles for pool in pools]
    while missing := missing_room(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]]):
        left = end - time.monotonic()
        if left <= 0:
            return missing
        if missing != said:
            print(f"the Ray cluster lacks {missing}; waiting up to {left:.0f} s for it ({why})", flush=True)
            said = missing
        time.sleep(min(_SECONDS_BETWEEN_LOOKS, left))
    return None
