"""Checks of the Ray cluster that a run of several processes needs."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, RayCluster, Run
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check

_JOIN = "bash scripts/ray_node.sh"


@check("ray-address", needs.ray)
def find_wrong_address(facts: Facts) -> Iterator[Finding]:
    """RAY_ADDRESS unset although a cluster is there or needed, or one that nobody answers at"""
    ray, nnodes = facts.ray, 1 if facts.run is None else facts.run["trainer.nnodes"]
    if ray is None:
        return
    if ray.problem is not None and ray.port_holder is None:
        what, _, do = ray.problem.rstrip(".").partition(". ")
        if ray.started:
            do = f"export RAY_ADDRESS={ray.started[0]} (a cluster that answers here)"
        which = "a run on Ray" if facts.run is None else "the run"
        yield error(what, f"{which} would end before its first step", do or "unset RAY_ADDRESS")
    if ray.address is None and ray.started:
        yield _says(
            nnodes > 1,
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


def _says(is_error: bool, what: str, why: str, do: str) -> Finding:
    return error(what, why, do) if is_error else warning(what, why, do)


@check("ray-resources", needs.a_run)
def find_missing_resources(facts: Facts) -> Iterator[Finding]:
    """fewer GPUs or nodes than the run asks for (a local Ray started by mistake)"""
    run, ray = facts.run, facts.ray
    if run is None:
        return
    asked, where, found = run.num_gpus_asked, "this machine has", facts.here.num_gpus
    if run.needs_ray and ray is not None and ray.address is not None:
        if not ray.nodes:
            return  # it could not be asked; the check of the address says why
        where, found = "the cluster has", int(sum(node.num_gpus for node in ray.alive))
        yield from _find_missing_cpus(run, sum(node.num_cpus for node in ray.alive), where)
        if len(ray.alive) < run["trainer.nnodes"] or found >= asked:
            yield from _find_missing_nodes(run, ray)
            return
    elif run.needs_ray:
        yield from _find_missing_cpus(run, facts.here.num_cpus_ray, "the Ray that it would start here has")
    if asked and found is not None and found < asked:
        own = run.needs_ray and (ray is None or ray.address is None)
        where = "the Ray that it would start on this machine has" if own else where
        do = "trainer.device=cpu to train without GPUs, or fewer trainer.n_gpus_per_node"
        if own and ray is not None and ray.started:
            do = f"export RAY_ADDRESS={ray.started[0]}"
        elif own:
            do = f"export RAY_ADDRESS=<head node>:6379, or {do}"
        yield error(f"the run asks for {asked} GPUs, {where} {found}", "it would wait for them, or end", do)


def _find_missing_cpus(run: Run, num_cpus: float, where: str) -> Iterator[Finding]:
    each = run.get("trainer.cpus_per_process", 0)
    if run.num_processes * each > num_cpus:
        yield error(
            f"{run.num_processes} processes reserve {each} of Ray's CPUs each, {where} {num_cpus:g}",
            "the run would wait for them, or end",
            f"trainer.cpus_per_process={num_cpus / run.num_processes:.2g}",
        )


def _find_missing_nodes(run: Run, ray: RayCluster) -> Iterator[Finding]:
    per_node = run["trainer.n_gpus_per_node"] if run.num_gpus_asked else 0
    able = [node for node in ray.alive if node.num_gpus >= per_node]
    if len(able) < run["trainer.nnodes"]:
        dead = [node.name for node in ray.nodes if not node.is_alive]
        lost = f" ({', '.join(dead)} left it)" if dead else ""
        kind = f"nodes with {per_node} GPUs" if per_node else "nodes"
        yield error(
            f"trainer.nnodes={run['trainer.nnodes']}, the cluster has {len(able)} {kind}{lost}",
            "the run would wait for a minute and end",
            f"{_JOIN} worker --head {ray.address} on the missing ones, or trainer.nnodes={max(1, len(able))}",
        )


@check("driver-node", needs.cluster)
def find_driver_outside(facts: Facts) -> Iterator[Finding]:
    """a driver whose machine is no node of the cluster"""
    ray = facts.ray
    if ray is None or not ray.alive or ray.address is None:
        return
    own = {*facts.here.addresses, "127.0.0.1"}
    if not any(node.address in own for node in ray.alive):
        names = ", ".join(f"{node.name} ({node.address})" for node in ray.alive[:4])
        yield error(
            f"this machine ({facts.here.name}) is no node of the cluster at {ray.address}: {names}",
            "Ray reaches its driver through a node's own processes, and would wait a minute for them",
            f"start the run on one of these nodes, or {_JOIN} worker --head {ray.address} here",
        )


@check("ray-files", needs.a_ray_to_start)
def find_bad_ray_folder(facts: Facts) -> Iterator[Finding]:
    """a folder for Ray's files on NFS, or with too long a path for its sockets"""
    ray = facts.ray
    if ray is None or ray.address is not None:  # a running cluster has its folder
        return
    if ray.folder_problem is not None:
        what, _, do = ray.folder_problem.rstrip(".").partition(". ")
        yield error(what, "Ray would not start", do or "export RAY_TMPDIR=/tmp")
    if ray.folder_note is not None:
        yield warning(
            ray.folder_note, "logs and spilled objects go there", "export RAY_TMPDIR=<a short local path>"
        )


@check("nodes", needs.asked_nodes)
def find_silent_nodes(facts: Facts) -> Iterator[Finding]:
    """nodes of the cluster that don't run a task"""
    for name in facts.ray.silent if facts.ray else ():
        yield error(
            f"the node {name} did not run the doctor's task",
            "a process of the run that is put there would not start either",
            "look at /tmp/ray/session_latest/logs/raylet.out there, or take the node out with `ray stop`",
        )
