"""RayResourcePool: where in a Ray cluster the processes of a worker group go."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool

_SECONDS_TO_WAIT_SILENTLY = 5.0


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

    def create_placement_group(self) -> PlacementGroup:
        """Reserves one bundle per node. ValueError if the cluster has no room within the timeout."""
        bundles = [
            {"CPU": self.num_cpus_per_process * count} | ({"GPU": float(count)} if self.use_gpu else {})
            for count in self.process_on_nodes
        ]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        wanted = f"one node each with {bundles}"
        if group.wait(min(_SECONDS_TO_WAIT_SILENTLY, self.timeout_seconds)):
            return group
        print(f"waiting up to {self.timeout_seconds:g} s until the Ray cluster has {wanted}", flush=True)
        if not group.wait(max(self.timeout_seconds - _SECONDS_TO_WAIT_SILENTLY, 0.0)):
            remove_placement_group(group)
            free = {key: n for key, n in ray.available_resources().items() if key in ("CPU", "GPU")}
            num_nodes = sum(node["Alive"] for node in ray.nodes())
            raise ValueError(
                f"no room in the Ray cluster after {self.timeout_seconds:g} s: the run needs {wanted}, and "
                f"there are {num_nodes} nodes with {free} free in all. Lower trainer.n_gpus_per_node or "
                "trainer.nnodes, end what holds the rest, or let others join (scripts/ray_node.sh)."
            )
        return group
