"""A process that died is named with its node and what killed it, as far as that can be known."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, OutOfMemoryError

from verl.single_controller.ray import deaths
from verl.single_controller.ray.deaths import ProcessPlace, describe_death

PLACE = ProcessPlace(123, "alpha", "10.0.0.3", "node-of-alpha", oom_kills=4)
BROKEN = RuntimeError(
    "The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits "
    "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by "
    "the OOM killer due to high memory usage."
)


@pytest.fixture
def cluster(monkeypatch):
    """The node is there, its kernel has killed nothing since, and the process wrote nothing."""

    class Here:
        def get_node_id(self):
            return PLACE.node

    state = {"alive": True, "oom_kills": 4, "lines": []}
    monkeypatch.setattr(deaths, "_SECONDS_FOR_LAST_LINES", 0.0)
    monkeypatch.setattr(deaths.ray, "nodes", lambda: [{"NodeID": PLACE.node, "Alive": state["alive"]}])
    monkeypatch.setattr(deaths.ray, "get_runtime_context", Here)
    monkeypatch.setattr(deaths, "num_oom_kills", lambda: state["oom_kills"])
    monkeypatch.setattr(deaths, "last_lines_seen", lambda address, pid: state["lines"])
    return state


def told(error=BROKEN):
    return describe_death("sampler-0", PLACE, "poll", error)


def test_a_killed_process_is_named_with_its_node(cluster):
    assert told() == (
        "sampler-0 on node alpha (10.0.0.3, pid 123) was killed by SIGKILL during poll, or ended itself "
        "without a word."
    )
    cluster["lines"] = ["about to work"]
    assert told().endswith("Its last lines:\n    | about to work")


def test_want_of_memory_is_known_from_the_kernel_of_the_node_and_from_ray(cluster):
    cluster["oom_kills"] = 5
    assert "was killed during poll, out of memory: since it began the kernel of its node" in told()
    by_ray = OutOfMemoryError("Task was killed due to the node running low on memory.")
    assert "was killed during poll, out of memory: Task was killed due to" in told(by_ray)


def test_a_crash_is_no_kill(cluster):
    cluster["lines"] = ["step 3", "*** SIGSEGV received at time=1 on cpu 0 ***"]
    assert "crashed during poll: *** SIGSEGV received" in told()


def test_a_lost_node_and_other_reasons_of_ray_are_said(cluster):
    assert "died during poll: exit was asked for" in told(RuntimeError("exit was asked for"))
    cluster["alive"] = False
    assert "died during poll: its node is lost (Ray says it is dead)." in told()
    early = describe_death("trainer-1", None, "its start", ActorDiedError())
    assert early.startswith("trainer-1 died during its start: ")


def test_the_kernels_count_is_a_number():
    assert deaths.num_oom_kills() >= 0
