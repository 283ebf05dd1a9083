"""Which nodes of a cluster a pool without GPUs goes to."""

import pytest

from verl.single_controller.ray.resource_pool import cpu_only_nodes


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
