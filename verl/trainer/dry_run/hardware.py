"""The machines that a dry run is for: what is asked for, or what is here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Hardware:
    """device: "cuda" (every process has a GPU of its own) or "cpu" (a node's processes share its memory).

    device_bytes: of one GPU, or of a node's memory. gpus_per_node: devices that a node has.
    source: where these numbers come from, in words.
    """

    device: str
    device_bytes: int
    gpus_per_node: int
    source: str


def hardware_for(device: str, gpu_memory_gb: float | None, gpus_per_node: int) -> Hardware:
    """What a run would have.

    Args:
        device: `trainer.device`: cpu, cuda or auto (GPUs if their memory is given or there are some here).
        gpu_memory_gb: GiB of each GPU of the machines that are meant; None: as this machine's.

    Raises:
        ValueError: GPUs are meant, none is here, and nothing says how much memory they have.
    """
    if device == "cpu" or (device == "auto" and gpu_memory_gb is None and not torch.cuda.is_available()):
        return Hardware("cpu", machine_memory(), gpus_per_node, "the memory of this machine")
    if gpu_memory_gb is not None:
        return Hardware("cuda", int(gpu_memory_gb * GIB), gpus_per_node, "trainer.dry_run_gpu_memory_gb")
    if not torch.cuda.is_available():
        raise ValueError(
            "trainer.device=cuda, but this machine has no GPU whose memory could be read; say how much the "
            "GPUs have that the run is for, for example trainer.dry_run_gpu_memory_gb=80"
        )
    properties = torch.cuda.get_device_properties(0)
    return Hardware("cuda", properties.total_memory, gpus_per_node, f"{properties.name} of this machine")


def machine_memory() -> int:
    """Bytes of memory that this machine, or the container that it is, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total
