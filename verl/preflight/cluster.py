"""The Ray cluster that a run would use, and the checks on each of its machines.

look_at_ray    RAY_ADDRESS, what `ray start` left here, the head node's list of nodes: takes no second
check_nodes    connects, and runs the checks of machines pinned to each node: seconds
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from verl.preflight.findings import CHECKS, Finding
from verl.preflight.machine import Machine, port_holder
from verl.preflight.target import Cluster, RayNode, Target

TASK_SECONDS = 90.0
CURRENT_CLUSTER = "ray_current_cluster"  # `ray start` writes the head node's address there


@dataclass(frozen=True)
class MachineReport:
    """What the checks found on one machine. looked: names of those that had something to look at. versions:
    of what must be the same on all nodes.
    """

    name: str
    findings: tuple[Finding, ...]
    looked: frozenset[str]
    versions: dict[str, str]


def check_machine(target: Target, names: Sequence[str]) -> MachineReport:
    """Runs the checks of machines on this one."""
    machine, findings, looked = Machine(target), [], set()
    for name in names:
        if CHECKS[name].on_machines and (one := CHECKS[name].run(machine)) is not None:
            findings += one
            looked.add(name)
    return MachineReport(socket.gethostname(), tuple(findings), frozenset(looked), versions())


def versions() -> dict[str, str]:
    """Of Python, the packages that processes exchange objects with, and NCCL."""
    known = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "ray", "transformers"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            known[package] = "none"
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known


def look_at_ray() -> Cluster:
    """What can be known without connecting. Imports Ray: for runs that need it."""
    from verl.single_controller.ray.session import list_nodes

    address = os.environ.get("RAY_ADDRESS") or None
    started = tuple(one for one in _started_here() if _answers(one))
    if address == "auto" and not started:
        return Cluster(address, started, "RAY_ADDRESS=auto: no Ray cluster runs on this machine")
    head = started[0] if address == "auto" else address
    if head is None:
        return Cluster(None, started)
    try:
        nodes = [
            RayNode(
                node.node_manager_hostname,
                node.node_manager_address,
                node.resources_total.get("CPU", 0.0),
                node.resources_total.get("GPU", 0.0),
                node.state == 0,
            )
            for node in list_nodes(head)
        ]
        return Cluster(address, started, nodes=tuple(nodes))
    except ValueError as error:
        return Cluster(address, started, str(error), _holder(head))


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
    from verl.single_controller.ray.environment import card_of_address

    host, _, port = address.rpartition(":")
    try:
        is_here = card_of_address(socket.gethostbyname(host)) is not None
    except OSError:
        return None
    return port_holder(int(port)) if is_here and port.isdigit() else None


def check_nodes(target: Target, names: Sequence[str]) -> tuple[Cluster, list[MachineReport]]:
    """Runs the checks of machines on each node that is alive, by a task pinned to it.

    Returns:
        The cluster with the nodes that did not answer, or with why it can't be connected to; the reports of
        the others.
    """
    import ray

    from verl.single_controller.ray import init_ray
    from verl.single_controller.ray.environment import secret_variables

    assert target.cluster is not None
    try:
        session = init_ray(log_to_driver=False)
    except ValueError as error:
        return replace(target.cluster, problem=str(error)), []
    names = [name for name in names if CHECKS[name].on_machines]
    reports: list[MachineReport] = []
    silent: list[str] = []
    with session:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        tasks = {
            _pinned(_check_on_node, node["NodeID"]).remote(target, names, secret_variables()): node
            for node in nodes
        }
        ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=TASK_SECONDS)
        for task in ready:
            try:
                reports.append(ray.get(task))
            except ray.exceptions.RayError as error:  # the node died, or can't import this package
                last_line = str(error).strip().splitlines()[-1]
                silent.append(f"{tasks[task]['NodeManagerHostname']} ({last_line})")
        for task in late:
            silent.append(tasks[task]["NodeManagerHostname"])
            ray.cancel(task, force=True)
    reports.sort(key=lambda report: report.name)
    return replace(target.cluster, silent=tuple(silent)), reports


def _pinned(body: Any, node_id: str) -> Any:
    """A Ray task on one node, with the variables of the run's workers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl.single_controller.ray.environment import carried_variables, import_path

    return ray.remote(body).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": carried_variables() | {"PYTHONPATH": import_path()}},
    )


def _check_on_node(target: Target, names: Sequence[str], secrets: dict[str, str]) -> MachineReport:
    """The task's body."""
    import verl.preflight.machine_checks  # noqa: F401  # fills CHECKS

    os.environ.update(secrets)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides GPUs from tasks that reserve none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return check_machine(target, names)
