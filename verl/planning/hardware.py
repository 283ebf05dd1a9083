"""The hardware of a run: the device of its processes, and how much memory that has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from verl.config import Config

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Hardware:
    """The hardware of a run.

    Attributes:
        device: "cuda" if every process has a GPU of its own, or "cpu" if a node's processes share its memory.
        device_bytes: The bytes of memory of one GPU, or of a node.
        source: The source of that number, in words.
    """

    device: str
    device_bytes: int
    source: str

    @classmethod
    def of(cls, config: Config) -> Hardware:
        """Return the hardware that a run would have.

        It has GPUs with `trainer.dry_run_gpu_memory_gb`, or else those of this machine.

        Raises:
            ValueError: If GPUs are meant, this machine has none, and nothing says how much memory they have.
        """
        device = config.trainer.device
        gpu_memory_gb = config.trainer.dry_run_gpu_memory_gb
        import torch

        has_gpu = torch.cuda.is_available()
        if device == "cpu" or (device == "auto" and gpu_memory_gb is None and not has_gpu):
            return cls("cpu", memory_of_machine(), "the memory of this machine")
        if gpu_memory_gb is not None:
            return cls("cuda", int(gpu_memory_gb * GIB), "trainer.dry_run_gpu_memory_gb")
        if not has_gpu:
            raise ValueError(
                "trainer.device=cuda, but this machine has no GPU whose memory could be read; say how much "
                "the GPUs have that the run is for, for example trainer.dry_run_gpu_memory_gb=80"
            )
        properties = torch.cuda.get_device_properties(0)
        return cls("cuda", properties.total_memory, f"{properties.name} of this machine")


def memory_of_machine(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory that this process may use.

    They are the machine's memory, or the limit of a control group if that is lower. SLURM and systemd put
    jobs into deeply nested groups, and each group on the way up counts. Version 1 of control groups has a
    root of its own.
    """
    sizes = [psutil.virtual_memory().total]
    for line in read_text(own).splitlines():
        folder = Path(line.split(":", 2)[2])
        for inside in (folder, *folder.parents):
            for root, name in ((cgroups, "memory.max"), (cgroups / "memory", "memory.limit_in_bytes")):
                text = read_text(root / inside.relative_to("/") / name)
                sizes += [int(text)] if text.isdigit() else []
    return min(sizes)


def read_text(path: Path) -> str:
    """Return the stripped text of a file, or "" if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
