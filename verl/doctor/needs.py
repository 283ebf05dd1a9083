"""What a check needs before it can look: each need says in words what is not there, None when it is.

Facts -> words | None. A check whose need is not there has not looked, and is not counted.
"""

from __future__ import annotations

from verl.doctor.facts import Facts
from verl.doctor.facts_run import SFT

_RUN = "a run's settings (key=value)"
_CLUSTER = "a Ray cluster at RAY_ADDRESS"
_RAY_RUN = "a run on Ray"


def nothing(facts: Facts) -> str | None:
    """It always looks."""
    return None


def a_run(facts: Facts) -> str | None:
    return _RUN if facts.run is None else None


def a_policy_run(facts: Facts) -> str | None:
    """Not a supervised one."""
    return a_run(facts) or ("reinforcement learning" if facts.run and facts.run.program == SFT else None)


def servers(facts: Facts) -> str | None:
    if any(machine.servers for machine in facts.machines):
        return None
    return a_run(facts) or "a run that searches"


def ray(facts: Facts) -> str | None:
    """What is known of Ray here, be it that nothing is set."""
    if facts.ray is not None:
        return None
    return "Ray" if facts.run is None else _RAY_RUN


def a_ray_to_start(facts: Facts) -> str | None:
    """A running cluster has its folder and settings."""
    started = facts.ray is not None and facts.ray.address is not None
    return "a Ray that the run starts itself (RAY_ADDRESS is set)" if started else ray(facts)


def cluster(facts: Facts) -> str | None:
    """One that has said which nodes it has."""
    return None if facts.ray is not None and facts.ray.nodes else ray(facts) or _CLUSTER


def nodes(facts: Facts) -> str | None:
    """Nodes of a cluster that were looked at."""
    if facts.nodes:
        return None
    return cluster(facts) or "answers of its nodes, which --quick does not ask"


def asked_nodes(facts: Facts) -> str | None:
    """Nodes of a cluster that were asked, whether they answered or not."""
    return None if facts.ray is not None and facts.ray.silent else nodes(facts)


def nodes_of_a_run(facts: Facts) -> str | None:
    return a_run(facts) or nodes(facts)


def servers_or_ray(facts: Facts) -> str | None:
    return servers(facts) and ray(facts)


def uses_of_ray(facts: Facts) -> str | None:
    """A run on Ray, or nodes that may get one."""
    if facts.run is None:
        return nodes(facts) and _RUN
    return None if facts.uses_ray else _RAY_RUN


def several_nodes(facts: Facts) -> str | None:
    return None if facts.has_several_nodes else (a_run(facts) or "trainer.nnodes above 1")


def memory(facts: Facts) -> str | None:
    """Something to compare memory with: what a run takes, or the object store of a node."""
    return None if facts.ray is not None and facts.ray.alive else a_policy_run(facts)


def places(facts: Facts) -> str | None:
    """A folder that a run, or Ray, writes to."""
    return a_run(facts) if facts.ray is None else None


def ray_place(facts: Facts) -> str | None:
    return None if any(machine.place("Ray's files") for machine in facts.machines) else ray(facts)


def an_index(facts: Facts) -> str | None:
    return "--index_path" if facts.index is None else None


def tried_gpus(facts: Facts) -> str | None:
    """No GPUs, or some that were tried."""
    if any(machine.gpus for machine in facts.machines) or not any(m.num_gpus for m in facts.machines):
        return None
    return "a try of the GPUs (nvidia-smi; --quick and trainer.device=cpu leave it out)"
