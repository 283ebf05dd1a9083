"""The Ray cluster that a run would use: its address, its nodes, and each of them looked at by a task.

look_at_ray    RAY_ADDRESS, what `ray start` left here, the head node's list of nodes: fractions of a second
look_at_nodes  connects, and runs `look_at_machine` pinned to each node: seconds
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import verl
from verl.doctor.facts import Machine, RayCluster, RayNode, from_json, to_json
from verl.doctor.facts_machine import Order, look_at_machine
from verl.doctor.facts_network import look_at_cards, port_holder

LIST_SECONDS = 5.0
TASK_SECONDS = 90.0
CLOCK_TRIPS, CLOCK_SECONDS = 4, 20.0
CURRENT_CLUSTER = "ray_current_cluster"  # `ray start` writes the head node's address there


def look_at_ray() -> RayCluster:
    """What can be known without connecting. Imports Ray: for runs that need it."""
    from verl.single_controller.ray.session import check_address
    from verl.single_controller.ray.temp_dir import choose_temp_dir

    address = os.environ.get("RAY_ADDRESS") or None
    started = tuple(found for found in _started_here() if _answers(found))
    folder_problem = folder_note = problem = holder = None
    try:
        _, folder_note = choose_temp_dir()
    except ValueError as error:
        folder_problem = str(error)
    nodes: tuple[RayNode, ...] = ()
    head = started[0] if address == "auto" and started else address
    if address == "auto" and not started:
        problem = "RAY_ADDRESS=auto: no Ray cluster runs on this machine"
    elif head is not None:
        try:
            check_address(head)
            nodes = _list_nodes(head)
        except ValueError as error:
            problem, holder = str(error), _holder(head)
    return RayCluster(address, started, problem, holder, folder_problem, folder_note, nodes)


def _started_here() -> list[str]:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(folder) / "ray" / CURRENT_CLUSTER).read_text().split()
    except OSError:
        return []


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def _holder(address: str) -> str | None:
    """What listens on the port, where the address is this machine's."""
    host, _, port = address.rpartition(":")
    own = {address for card in look_at_cards() for address in card.addresses}
    here = host in {"127.0.0.1", "localhost", socket.gethostname()} | own
    return port_holder(int(port)) if here and port.isdigit() else None


def _list_nodes(address: str) -> tuple[RayNode, ...]:
    """The nodes by the head node's list. ValueError when it gives none."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # as `ray status`; there is no public one
    from ray.exceptions import RpcError

    try:
        found = GcsClient(address=address).get_all_node_info(timeout=LIST_SECONDS).values()
    except RpcError as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: the head node there does not list its nodes ({error})"
        ) from error
    return tuple(
        RayNode(
            node.node_manager_hostname,
            node.node_manager_address,
            node.resources_total.get("CPU", 0.0),
            node.resources_total.get("GPU", 0.0),
            int(node.resources_total.get("object_store_memory", 0)),
            node.state == 0,
        )
        for node in found
    )


def look_at_nodes(cluster: RayCluster, order: Order) -> tuple[RayCluster, tuple[Machine, ...]]:
    """Each node that is alive, by a task pinned to it; the cluster, with those that did not answer.

    ValueError when the cluster can't be connected to.
    """
    import ray

    from verl.single_controller.ray import init_ray
    from verl.single_controller.ray.environment import secret_variables

    with init_ray(log_to_driver=False):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        started = time.monotonic()
        tasks = {
            _task(node["NodeID"], _look).remote(order.to_json(), secret_variables()): node for node in nodes
        }
        machines: list[Machine] = []
        silent: list[str] = []
        waiting = list(tasks)
        while waiting and time.monotonic() < started + TASK_SECONDS:
            ready, waiting = ray.wait(waiting, timeout=max(0.1, started + TASK_SECONDS - time.monotonic()))
            for task in ready:
                _take(task, tasks[task], machines, silent)
        silent += [tasks[task]["NodeManagerHostname"] for task in waiting]
        for task in waiting:
            ray.cancel(task, force=True)
    return replace(cluster, silent=tuple(silent)), tuple(sorted(machines, key=lambda machine: machine.name))


def _task(node_id: str, body: Callable[..., Any]) -> Any:
    """A Ray task on one node, with the variables of the run's workers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl.single_controller.ray.environment import carried_variables

    paths = [str(Path(verl.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = carried_variables() | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return ray.remote(body).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": variables},
    )


def _look(order: dict[str, Any], secrets: dict[str, str]) -> dict[str, Any]:
    """The task's body."""
    os.environ.update(secrets)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides GPUs from tasks that reserve none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return to_json(look_at_machine(Order.from_json(order)))


def _take(task: Any, node: dict[str, Any], machines: list[Machine], silent: list[str]) -> None:
    import ray

    try:
        machine = from_json(Machine, ray.get(task))
        offset, give_or_take = _compare_clocks(node["NodeID"])
    except ray.exceptions.RayError as error:  # the node died, or can't import this package
        silent.append(f"{node['NodeManagerHostname']} ({str(error).strip().splitlines()[-1]})")
        return
    machines.append(replace(machine, clock_offset_s=offset, clock_error_s=give_or_take))


def _now() -> float:
    """The task's body; Ray takes no built-in function for one."""
    return time.time()


def _compare_clocks(node_id: str) -> tuple[float, float]:
    """(seconds that a node's clock is ahead of ours, give or take), by the fastest of a few round trips."""
    import ray

    task, best = _task(node_id, _now), (0.0, float("inf"))
    for _ in range(CLOCK_TRIPS):
        sent = time.time()
        there = ray.get(task.remote(), timeout=CLOCK_SECONDS)
        received = time.time()
        best = min(best, (there - (sent + received) / 2, (received - sent) / 2), key=lambda pair: pair[1])
    return best
