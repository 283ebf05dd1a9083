"""RayResourcePool: where in a Ray cluster the processes of a worker group go.

With GPUs: on nodes that have as many free ones. Without: on nodes that have no GPUs at all, if the cluster
has enough of them, so that a run on CPUs does not take the CPUs of those that train on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool

_NODE_ID = "ray.io/node-id"  # a label that Ray gives each node


class RayResourcePool(ResourcePool):
    """`process_on_nodes[i]` processes on the i-th of as many different nodes.

    Each process reserves `num_cpus_per_process` of Ray's CPU count (a share, so that a machine of two cores
    can host several) and, with `use_gpu`, one GPU of its own.
    """

    def __init__(
        self, process_on_nodes: Sequence[int], use_gpu: bool = False, num_cpus_per_process: float = 0.25
    ) -> None:
        super().__init__(process_on_nodes, use_gpu)
        self.num_cpus_per_process = num_cpus_per_process

    def create_placement_group(self, timeout_seconds: float = 60.0) -> PlacementGroup:
        """Reserves one bundle per node. ValueError if the cluster has no room within the timeout."""
        bundles = [{"CPU": self.num_cpus_per_process * count} for count in self.process_on_nodes]
        if self.use_gpu:
            bundles = [b | {"GPU": float(n)} for b, n in zip(bundles, self.process_on_nodes, strict=True)]
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
