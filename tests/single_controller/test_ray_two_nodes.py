"""A cluster of two nodes (two raylets on this machine), joined by RAY_ADDRESS."""

from __future__ import annotations

import pytest
from sample_workers import ScaleWorker, sample_batch

from verl.single_controller import ClassWithInitArgs, ResourcePool, build_worker_groups

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from verl.single_controller.ray import init_ray
    from verl.single_controller.ray.agent_ports import fixed_agent_ports

    assert not ray.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
            patch.setenv(name, "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with fixed_agent_ports():
            cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
            )
        try:
            with fixed_agent_ports():
                cluster.second = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes(timeout=60)
            patch.setenv("RAY_ADDRESS", cluster.address)
            with init_ray():
                yield cluster
            assert not ray.is_initialized()
        finally:
            cluster.shutdown()


ROLE = {"scale": ClassWithInitArgs(ScaleWorker, factor=2)}


def test_a_pool_of_two_nodes_takes_two_different_nodes_and_its_ranks_meet(cluster):
    with build_worker_groups("ray", ResourcePool([1, 1]), ROLE)["scale"] as group:
        assert len(set(group.ray_node())) == 2
        assert group.sum_of_ranks() == [3.0, 3.0]
        assert group.scale(sample_batch(3)).batch["y"].tolist() == [0, 2, 4]
