"""The Ray cluster that a run would use, its own checks, and those on each of its machines.

look_at_ray    reads RAY_ADDRESS, the addresses that `ray start` has written on this machine, and the head
               node's list of nodes, in less than a second
check_nodes    connects, and runs the checks of machines pinned to each node, in seconds
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from verl.config import Config
from verl.planning.hardware import read_text
from verl.planning.placement import num_processes, num_sampling
from verl.preflight.machine_checks import MACHINE_CHECKS
from verl.preflight.target import Cluster, Finding, RayNode, Target, error, ray_folder, warning
from verl.utils.device import loaded_nccl

TASK_SECONDS = 180.0
_JOIN = "bash scripts/ray_node.sh"
CURRENT_CLUSTER = "ray_current_cluster"  # `ray start` writes the head node's address there


def check_machine(target: Target, names: Sequence[str]) -> list[Finding]:
    """Run the checks of machines on this machine."""
    return [
        replace(finding, check=name)
        for name, find in MACHINE_CHECKS.items()
        if name in names
        for finding in find(target)
    ]


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages with which processes exchange objects, and of NCCL.

    NCCL's is that of the library which is loaded.
    """
    by_package = {"python": ".".join(platform.python_version_tuple()[:2])}
    by_package |= {package: metadata.version(package) for package in ("torch", "ray", "transformers")}
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        loaded = loaded_nccl()
        version = torch.cuda.nccl.version() if loaded is None else loaded.version
        by_package["NCCL"] = ".".join(map(str, version))
    return by_package


def look_at_ray() -> Cluster:
    """Return what can be known of the cluster without connecting to it.

    The function imports Ray, so call it only for runs that need Ray.
    """
    from verl.single_controller.ray.session import list_nodes

    address = os.environ.get("RAY_ADDRESS") or None
    written = read_text(Path(ray_folder()) / "ray" / CURRENT_CLUSTER).split()
    started = tuple(candidate for candidate in written if _accepts_connections(candidate))
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
    except ValueError as problem:
        return Cluster(address, started, str(problem))
    return Cluster(address, started, nodes=tuple(nodes))


def _accepts_connections(address: str) -> bool:
    """Return whether a process accepts connections at HOST:PORT within a second."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def check_nodes(target: Target, names: Sequence[str]) -> tuple[Target, list[Finding]]:
    """Run the checks of machines on each node that is alive, by a task pinned to it.

    Returns:
        The target and the findings. The target has the versions on each node and the nodes that did not
        answer, or the reason why there is no connection.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl.single_controller.ray import init_ray
    from verl.single_controller.ray.environment import carried_variables, import_path, secret_variables

    assert target.cluster is not None
    try:
        session = init_ray(log_to_driver=False)
    except ValueError as problem:
        return replace(target, cluster=replace(target.cluster, problem=str(problem))), []
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
            except ray.exceptions.RayError as problem:  # the node died, or can't import this package
                silent.append(f"{tasks[task]} ({str(problem).strip().splitlines()[-1]})")
        for task in late:
            silent.append(tasks[task])
            ray.cancel(task, force=True)
    cluster = replace(target.cluster, silent=tuple(silent))
    return replace(target, cluster=cluster, versions=versions_on), findings


def _check_on_node(
    target: Target, names: Sequence[str], secrets: dict[str, str]
) -> tuple[str, dict[str, str], list[Finding]]:
    """Run the checks in a task, and return the machine's name, its versions, and the findings."""
    os.environ.update(secrets)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides GPUs from tasks that reserve none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return socket.gethostname(), versions(), check_machine(target, names)


def find_wrong_address(target: Target) -> Iterator[Finding]:
    """Find that RAY_ADDRESS is unset although a cluster runs or is needed, or that nobody answers at it."""
    ray = target.cluster
    nnodes = 1 if target.config is None else target.config.trainer.nnodes
    if ray is None:
        return
    if ray.problem is not None:
        do = f"export RAY_ADDRESS={ray.started[0]} (a cluster that answers here)" if ray.started else ""
        yield error(ray.problem.rstrip("."), "", do)
    elif ray.address is None and ray.started:
        make = error if nnodes > 1 else warning
        yield make(
            f"RAY_ADDRESS is not set, and a Ray cluster runs here at {ray.started[0]}",
            "a run of several processes would start a second Ray of this machine alone, beside the cluster",
            f"export RAY_ADDRESS={ray.started[0]}",
        )
    elif ray.address is None and nnodes > 1:
        yield error(
            f"trainer.nnodes={nnodes}, and RAY_ADDRESS is not set",
            "a Ray that the run starts by itself has one node, and the run would wait for the others",
            f"{_JOIN} head here, {_JOIN} worker --head <this machine>:6379 on the others, export "
            "RAY_ADDRESS=<this machine>:6379",
        )


def find_missing_resources(target: Target) -> Iterator[Finding]:
    """Find fewer GPUs, CPUs or nodes than the run asks for, such as in a local Ray started by mistake."""
    config = target.config
    ray = target.cluster
    if config is None or (ray is not None and ray.problem is not None):  # the check of the address says why
        return
    trainer = config.trainer
    num_gpus_asked = target.num_gpus_asked
    processes = num_processes(config) + num_sampling(config)
    if ray is not None and ray.address is not None:
        per_node = trainer.n_gpus_per_node if num_gpus_asked else 0
        able = [node for node in ray.alive if node.num_gpus >= per_node]
        num_cpus = sum(node.num_cpus for node in ray.alive)
        num_gpus = int(sum(node.num_gpus for node in ray.alive))
        where = "the cluster has"
        if len(able) < trainer.nnodes and num_gpus >= num_gpus_asked:
            dead = ", ".join(node.name for node in ray.nodes if not node.is_alive)
            yield error(
                f"trainer.nnodes={trainer.nnodes}, the cluster has {len(able)} nodes"
                + (f" with {per_node} GPUs" if per_node else "")
                + (f" ({dead} left it)" if dead else ""),
                "the run would wait for a minute and end",
                f"{_JOIN} worker --head {ray.address} on the missing ones, or trainer.nnodes={len(able)}",
            )
    else:
        num_cpus = 0.0
        if target.needs_ray:
            from verl.single_controller.ray.session import cores_for_ray

            num_cpus = float(cores_for_ray())
        num_gpus = torch.cuda.device_count()
        where = "the Ray that it would start on this machine has" if target.needs_ray else "this machine has"
    cpus_per_process = config.trainer.cpus_per_process if isinstance(config, Config) else 0
    if target.needs_ray and processes * cpus_per_process > num_cpus:
        yield error(
            f"{processes} processes reserve {cpus_per_process:g} of Ray's CPUs each, {where} {num_cpus:g}",
            "the run would wait for them, or end",
            f"at most {num_cpus / cpus_per_process:g} processes on these machines",
        )
    if num_gpus < num_gpus_asked:
        do = "trainer.device=cpu to train without GPUs, or fewer trainer.n_gpus_per_node"
        if ray is not None and ray.address is None:
            do = f"export RAY_ADDRESS={ray.started[0] if ray.started else f'<head node>:6379, or {do}'}"
        what = f"the run asks for {num_gpus_asked} GPUs, {where} {num_gpus}"
        yield error(what, "it would wait for them, or end", do)


def find_driver_outside(target: Target) -> Iterator[Finding]:
    """Find a driver whose machine is no node of the cluster."""
    from verl.single_controller.ray.environment import card_of_address

    ray = target.cluster
    if ray is not None and ray.alive and not any(card_of_address(node.address) for node in ray.alive):
        names = ", ".join(f"{node.name} ({node.address})" for node in ray.alive[:4])
        yield error(
            f"this machine ({socket.gethostname()}) is no node of the cluster at {ray.address}: {names}",
            "Ray reaches its driver through a node's own processes, and would wait a minute for them",
            f"start the run on one of these nodes, or {_JOIN} worker --head {ray.address} here",
        )


def find_bad_ray_folder(target: Target) -> Iterator[Finding]:
    """Find a folder for Ray's files that is on NFS, or whose path is too long for its sockets."""
    from verl.single_controller.ray.session import choose_temp_dir

    if target.cluster is None or target.cluster.address is not None:
        return
    try:
        _, note = choose_temp_dir()
    except ValueError as problem:
        yield error(str(problem).rstrip("."))
        return
    if note is not None:
        yield warning(note, "logs and spilled objects go there", "export RAY_TMPDIR=<a short local path>")


def compare_nodes(target: Target) -> Iterator[Finding]:
    """Find nodes that run no task, or have other versions of Python, torch, Ray, transformers or NCCL."""
    for name in target.cluster.silent if target.cluster is not None else ():
        yield error(
            f"the node {name} did not run the preflight's task",
            "a process of the run that is put there would not start either",
            "look at /tmp/ray/session_latest/logs/raylet.out there, or take the node out with `ray stop`",
        )
    for package, ours in versions().items() if target.versions else ():
        others = {name: of_node.get(package, "none") for name, of_node in target.versions.items()}
        others = {name: version for name, version in others.items() if version != ours}
        other_versions = ", ".join(sorted(set(others.values())))
        if others:
            yield error(
                f"{package} is {ours} here and {other_versions} on {', '.join(others)}",
                "objects and collectives between them fail, or give wrong numbers",
                "on each node: pip install -c constraints.txt -e '.[train]' (or one shared environment)",
            )


RAY_CHECKS: dict[str, Callable[[Target], Iterator[Finding]]] = {
    "ray-address": find_wrong_address,
    "ray-resources": find_missing_resources,
    "driver-node": find_driver_outside,
    "ray-files": find_bad_ray_folder,
    "nodes": compare_nodes,
}
