"""The Ray cluster that a run would use, and the checks on each of its machines.

look_at_ray    RAY_ADDRESS, what `ray start` left here, the head node's list of nodes: takes no second
check_nodes    connects, and runs the checks of machines pinned to each node: seconds
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from verl.preflight.findings import Finding
from verl.preflight.machine import ray_folder, read_text
from verl.preflight.machine_checks import MACHINE_CHECKS
from verl.preflight.target import Cluster, RayNode, Target

TASK_SECONDS = 90.0
CURRENT_CLUSTER = "ray_current_cluster"  # `ray start` writes the head node's address there


def check_machine(target: Target, names: Sequence[str]) -> list[Finding]:
    """Runs the checks of machines on this one."""
    return [
        replace(finding, check=name)
        for name, find in MACHINE_CHECKS.items()
        if name in names
        for finding in find(target)
    ]


def versions() -> dict[str, str]:
    """Of Python, the packages that processes exchange objects with, and NCCL."""
    known = {"python": ".".join(platform.python_version_tuple()[:2])}
    known |= {package: metadata.version(package) for package in ("torch", "ray", "transformers")}
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known


def look_at_ray() -> Cluster:
    """What can be known without connecting. Imports Ray: for runs that need it."""
    from verl.single_controller.ray.session import list_nodes

    address = os.environ.get("RAY_ADDRESS") or None
    written = read_text(Path(ray_folder()) / "ray" / CURRENT_CLUSTER).split()
    started = tuple(one for one in written if _answers(one))
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
    except ValueError as error:
        return Cluster(address, started, str(error))
    return Cluster(address, started, nodes=tuple(nodes))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def check_nodes(target: Target, names: Sequence[str]) -> tuple[Target, list[Finding]]:
    """Runs the checks of machines on each node that is alive, by a task pinned to it.

    Returns:
        The target with the versions on each node, and with the nodes that did not answer or why the cluster
        can't be connected to; what was found on the others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl.single_controller.ray import init_ray
    from verl.single_controller.ray.environment import carried_variables, import_path, secret_variables

    assert target.cluster is not None
    try:
        session = init_ray(log_to_driver=False)
    except ValueError as error:
        return replace(target, cluster=replace(target.cluster, problem=str(error))), []
    variables = carried_variables() | {"PYTHONPATH": import_path()}
    findings: list[Finding] = []
    silent: list[str] = []
    versions_on: dict[str, dict[str, str]] = {}
    with session:
        tasks = {}
        for node in ray.nodes():
            if node["Alive"]:
                pinned = ray.remote(_check_on_node).options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                    runtime_env={"env_vars": variables},
                )
                tasks[pinned.remote(target, names, secret_variables())] = node["NodeManagerHostname"]
        ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=TASK_SECONDS)
        for task in ready:
            try:
                name, versions_on[name], ours = ray.get(task)
                findings += [replace(finding, machines=(name,)) for finding in ours]
            except ray.exceptions.RayError as error:  # the node died, or can't import this package
                silent.append(f"{tasks[task]} ({str(error).strip().splitlines()[-1]})")
        for task in late:
            silent.append(tasks[task])
            ray.cancel(task, force=True)
    cluster = replace(target.cluster, silent=tuple(silent))
    return replace(target, cluster=cluster, versions=versions_on), findings


def _check_on_node(
    target: Target, names: Sequence[str], secrets: dict[str, str]
) -> tuple[str, dict[str, str], list[Finding]]:
    """The task's body. Returns (the machine's name, its versions, what is found)."""
    os.environ.update(secrets)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides GPUs from tasks that reserve none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return socket.gethostname(), versions(), check_machine(target, names)
