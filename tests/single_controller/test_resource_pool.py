"""Which nodes of a cluster a pool without GPUs goes to."""

import pytest

from verl.single_controller.ray.resource_pool import RayResourcePool, cpu_only_nodes


def node(name: str, cpus: float, gpus: float = 0, alive: bool = True) -> dict:
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {"Alive": alive, "Resources": resources, "Labels": {"ray.io/node-id": name}}


@pytest.mark.parametrize(
    ("cpus", "nodes", "expected"),
    [
        ([1.0], [node("a", 4), node("b", 4)], None),  # no GPUs anywhere: any node
        ([1.0], [node("a", 4, gpus=8), node("b", 4)], ["b"]),
        ([1.0, 1.0], [node("a", 4, gpus=8), node("b", 4)], None),  # not enough without
        ([8.0], [node("a", 16, gpus=8), node("b", 4)], None),  # b is too small
        ([1.0], [node("a", 4, gpus=8), node("b", 4, alive=False), node("c", 2)], ["c"]),
    ],
)
def test_processes_without_gpus_go_to_nodes_without_any_if_there_are_enough(cpus, nodes, expected):
    assert cpu_only_nodes(cpus, nodes) == expected


@pytest.mark.slow
@pytest.mark.ray
def test_in_a_mixed_cluster_a_pool_without_gpus_leaves_the_gpu_node_alone():
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table, remove_placement_group

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 1})
    try:
        plain = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        for use_gpu, wanted in ((False, plain.node_id), (True, cluster.head_node.node_id)):
            group = RayResourcePool([1], use_gpu).create_placement_group()
            assert set(placement_group_table(group)["bundles_to_node_id"].values()) == {wanted}
            remove_placement_group(group)
    finally:
        ray.shutdown()
        cluster.shutdown()
