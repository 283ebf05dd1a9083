"""Checks of GPUs, their driver, CUDA and NCCL. Judged from facts; tried on recorded ones, not yet on GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Gpu, Machine
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check, check_each

# CUDA's major version -> the oldest driver that runs its wheels, whatever the minor version
OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}
SLOW = 1.25  # times the median of its neighbours
BUSY_SHARE = 0.1  # of a GPU's memory that others may hold


@check_each("gpu-shared")
def find_shared_gpus(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """two ranks on one GPU"""
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        yield error(
            f"CUDA_VISIBLE_DEVICES={visible} holds {', '.join(twice)} twice",
            "two ranks would share one GPU: NCCL refuses that, and memory runs out",
            f"export CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(entries))}",
        )
    if machine.num_gpus and machine.environment.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        yield error(
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set",
            "Ray then gives no process a GPU of its own, and all of them take the first",
            "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (where Ray is started, too)",
        )


@check("gpu-twice", needs.nodes)
def find_gpus_on_two_nodes(facts: Facts) -> Iterator[Finding]:
    """one GPU offered by two nodes of the cluster (two Rays on one machine)"""
    owners: dict[str, list[str]] = {}
    for machine in facts.nodes:
        for gpu in machine.gpus:
            owners.setdefault(gpu.uuid, []).append(machine.name)
    twice = {uuid: names for uuid, names in owners.items() if len(names) > 1}
    if twice:
        names = next(iter(twice.values()))
        yield error(
            f"{len(twice)} GPUs are offered by more than one node ({' and '.join(names)})",
            "two ranks would be put on one GPU",
            "ray stop on that machine, and one `ray start` for it",
        )


@check_each("cuda")
def find_unusable_cuda(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """a driver too old for torch's CUDA, or a torch without CUDA beside a GPU"""
    software = machine.software
    wants_gpu = facts.run is None or facts.run["trainer.device"] != "cpu"
    if software.cuda_driver is None or not wants_gpu:
        return
    if software.torch_cuda is None:
        yield warning(
            f"this machine has an NVIDIA driver, torch {software.torch} is built without CUDA",
            "the run would train on the CPU",
            "pip install torch --force-reinstall (the wheel with CUDA), or trainer.device=cpu to mean it",
        )
        return
    oldest = OLDEST_DRIVER.get(software.torch_cuda.split(".")[0])
    found = tuple(int(part) for part in software.cuda_driver.split(".")[:2])
    if oldest is not None and found < oldest:
        yield error(
            f"the driver {software.cuda_driver} is too old for torch {software.torch} with CUDA "
            f"{software.torch_cuda}, which needs {oldest[0]}.{oldest[1]} or newer",
            "torch would see no GPU",
            f"a newer driver (the administrator), or a torch for its CUDA: pip install torch --index-url "
            f"<the index of PyTorch's wheels for CUDA {_cuda_of(found)}>",
        )


def _cuda_of(driver: tuple[int, ...]) -> str:
    fitting = [major for major, oldest in OLDEST_DRIVER.items() if driver >= oldest]
    return f"{fitting[-1]}.x" if fitting else "10.x"


@check_each("nccl")
def find_other_nccl(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """another NCCL before torch's own, or other NCCLs on other nodes"""
    software, ours = machine.software, facts.here.software.nccl_built
    for file, version in software.nccl_loaded.items():
        if software.nccl_built is not None and version != software.nccl_built:
            yield error(
                f"{file} is NCCL {version}, torch was built with {software.nccl_built}",
                "the dynamic linker takes it first: hangs and errors in the first collective",
                f"take {file.rpartition('/')[0]} out of LD_LIBRARY_PATH (and LD_PRELOAD)",
            )
    if facts.nodes and ours is not None and software.nccl_built not in (None, ours):
        yield error(
            f"NCCL is {software.nccl_built} there and {ours} on the driver's machine",
            "ranks with different NCCLs hang in their first collective",
            "the same torch on every node: pip install -c constraints.txt torch",
        )


def _to_be_used(machine: Machine) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by number or by the beginning of an id; all without it."""
    names = [name.strip() for name in machine.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = [
        gpu
        for gpu in machine.gpus
        if any(name and (name == str(gpu.index) or gpu.uuid.startswith(name)) for name in names)
    ]
    return named or list(machine.gpus)


@check_each("gpu-health", needs.tried_gpus)
def find_ailing_gpus(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """GPUs that are slow, compute wrong, have memory errors, or are held by others"""
    gpus = _to_be_used(machine)
    times = [gpu.matmul_s for gpu in gpus if gpu.matmul_s is not None]
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.name})"
        without = f"export CUDA_VISIBLE_DEVICES without {gpu.index}, and tell the administrator"
        if gpu.problem is not None:
            yield error(
                f"{name} can't multiply two matrices: {gpu.problem}", "no process could work on it", without
            )
        if gpu.ecc_errors:
            yield error(
                f"{name} has had {gpu.ecc_errors} uncorrected memory errors",
                "it crashes a run, or its numbers",
                without,
            )
        if gpu.needs_reset:
            yield warning(
                f"{name} has bad memory that is put aside at its next reset",
                "it fails sooner or later",
                f"nvidia-smi --gpu-reset -i {gpu.index} (when nobody uses it)",
            )
        if gpu.is_right is False:
            yield error(f"{name} gave two results for one product", "it trains on wrong numbers", without)
        others = [time for time in times if time is not gpu.matmul_s]
        if gpu.matmul_s is not None and others and gpu.matmul_s > SLOW * statistics.median(others):
            yield warning(
                f"{name} takes {1e3 * gpu.matmul_s:.1f} ms for a product, the others "
                f"{1e3 * statistics.median(others):.1f}",
                "all ranks wait for the slowest",
                f"nvidia-smi -q -i {gpu.index} -d CLOCK,PERFORMANCE,TEMPERATURE says why; or leave it out",
            )
        if gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
            yield warning(
                f"{name} has {gpu.used_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB in use already",
                "the run has less memory and less time on it than it counts on",
                f"nvidia-smi -i {gpu.index} shows by whom",
            )
