"""RayResourcePool: where in a Ray cluster the processes of a worker group go."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool


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
        group = placement_group(bundles, strategy="STRICT_SPREAD")
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
