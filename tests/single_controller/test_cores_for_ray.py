"""How many cores Ray counts on a machine."""

import os

import pytest

from verl.single_controller.ray import node, session
from verl.single_controller.ray.session import cores_for_ray


@pytest.fixture
def machine(monkeypatch):
    """A GH200, of which a job has no less."""
    for name in ("RAY_NUM_CPUS", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(288)))
    monkeypatch.setattr(session, "get_num_cpus", lambda **_: 288)
    return monkeypatch


def test_ray_counts_the_cores_of_the_job_and_not_all_of_a_large_machine(machine):
    assert cores_for_ray() == 64
    machine.setenv("SLURM_CPUS_ON_NODE", "12")
    assert cores_for_ray() == 12
    machine.setattr(session, "get_num_cpus", lambda **_: 3)  # a container's quota
    assert cores_for_ray() == 3
    machine.setenv("RAY_NUM_CPUS", "288")
    assert cores_for_ray() == 288
    machine.setenv("RAY_NUM_CPUS", "many")
    with pytest.raises(ValueError, match="Found RAY_NUM_CPUS=many; expected a number of cores"):
        cores_for_ray()


def test_a_node_is_started_with_these_cores_unless_its_arguments_say_others(machine):
    options, _ = node._arguments(["head"])
    assert node.ray_command(options, [])[-1] == "--num-cpus=64"
    assert [word for word in node.ray_command(options, ["--num-cpus=1"]) if "cpus" in word] == [
        "--num-cpus=1"
    ]
