"""DriverNode: a place for one process beside the driver, on its machine."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from verl.single_controller.ray.resource_pool import RayResourcePool

_SHARE = 0.001  # of what Ray calls node:<address>, which each node has 1 of


class DriverNode(RayResourcePool):
    """One process on the driver's node. It takes none of the CPUs and GPUs that Ray counts: it works while
    the workers wait for the driver.
    """

    def __init__(self) -> None:
        super().__init__([1], num_cpus_per_process=0)

    def create_placement_group(self, timeout_seconds: float = 60.0) -> PlacementGroup:
        group = placement_group([{f"node:{ray.util.get_node_ip_address()}": _SHARE}])
        if not group.wait(timeout_seconds):
            nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
            raise ValueError(
                f"Ray gave no place beside the driver within {timeout_seconds:.0f} s; start the driver on "
                f"one of the nodes {nodes}"
            )
        return group
