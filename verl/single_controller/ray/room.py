"""Whether a Ray cluster has the nodes that pools of processes need, and waiting until it has.

The answer is about what nodes have in all, not about what is free on them: whether other runs hold it, the
reservation (`RayResourcePool.create_placement_group`) finds out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import ray

from verl.single_controller.ray.resource_pool import RayResourcePool

_SECONDS_BETWEEN_LOOKS = 1.0
_COUNTED = ("CPU", "GPU")
Needs = dict[str, float]


def needs_of(pool: RayResourcePool) -> list[Needs]:
    """What each of a pool's nodes must have."""
    return [
        {"CPU": pool.num_cpus_per_process * count, "GPU": float(count if pool.use_gpu else 0)}
        for count in pool.process_on_nodes
    ]


def missing_room(pools: Sequence[list[Needs]], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What nodes lack for the pools, in words; None if there is room.

    Args:
        pools: needs of each node of each pool. A pool's nodes are different ones; pools may share nodes.
        nodes: resources of each node that is there.
    """
    free = [{name: node.get(name, 0.0) for name in _COUNTED} for node in nodes]
    lacking: list[Needs] = []
    for pool in pools:
        taken: set[int] = set()
        for needs in sorted(pool, key=lambda n: (n["GPU"], n["CPU"]), reverse=True):
            fitting = [
                index
                for index, left in enumerate(free)
                if index not in taken and all(left[name] >= needs[name] for name in _COUNTED)
            ]
            if not fitting:
                lacking.append(needs)
                continue
            best = min(fitting, key=lambda index: (free[index]["GPU"], free[index]["CPU"]))
            taken.add(best)
            free[best] = {name: free[best][name] - needs[name] for name in _COUNTED}
    if not lacking:
        return None
    wanted = ", ".join(sorted({_in_words(needs) for needs in lacking}))
    there = "; ".join(_in_words(node) for node in nodes) or "none"
    count = f"{len(lacking)} node{'s' if len(lacking) > 1 else ''}"
    return f"{count} with {wanted} free (nodes that are there: {there})"


def _in_words(resources: Mapping[str, float]) -> str:
    words = [f"{resources.get('CPU', 0):g} CPUs"]
    if resources.get("GPU"):
        words.append(f"{resources['GPU']:g} GPUs")
    return " and ".join(words)


def nodes_alive() -> list[Mapping[str, float]]:
    """Resources of each node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def wait_for_room(
    pools: Sequence[list[Needs]], timeout_seconds: float, say: Callable[[str], None], why: str
) -> str | None:
    """Waits until the cluster has the nodes that the pools need; returns what it lacks still at the end.

    Args:
        pools: as for `missing_room`.
        timeout_seconds: how long to wait.
        say: called with one line when there is something to wait for, and when what is missing changes.
        why: ends that line, e.g. the setting that gives the time.
    """
    end = time.monotonic() + timeout_seconds
    said = None
    while (missing := missing_room(pools, nodes_alive())) is not None:
        left = end - time.monotonic()
        if left <= 0:
            return missing
        if missing != said:
            say(f"the Ray cluster lacks {missing}; waiting up to {left:.0f} s for it ({why})")
            said = missing
        time.sleep(min(_SECONDS_BETWEEN_LOOKS, left))
    return None
