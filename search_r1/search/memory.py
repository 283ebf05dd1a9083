"""Free memory of the machine and of its GPUs, free disk space, and sizes for people."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl.utils.text import format_bytes

GPU_RESERVE_BYTES = 2 << 30  # on each GPU, for CUDA itself, the encoder, one chunk and its scores
VISIBLE = "CUDA_VISIBLE_DEVICES"
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


class GpuMemory(NamedTuple):
    """The bytes of a GPU that are free, and all of them."""

    free: int
    total: int


def visible_gpus() -> list[GpuMemory]:
    """Return the memory of the GPUs that this process sees, in their order."""
    import torch

    return [GpuMemory(*torch.cuda.mem_get_info(number)) for number in range(torch.cuda.device_count())]


def visible_words() -> str:
    """Return how CUDA_VISIBLE_DEVICES is set, for a message."""
    value = os.environ.get(VISIBLE)
    return f"{VISIBLE} is not set" if value is None else f"{VISIBLE}={value}"


def gpus_short_of(needs: Sequence[int], gpus: Sequence[GpuMemory]) -> str:
    """Return which GPUs have fewer free bytes than they need, for a message, or "" if none has."""
    short = [
        f"GPU {number} has {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
        for number, (gpu, need) in enumerate(zip(gpus, needs, strict=True))
        if gpu.free < need
    ]
    return f"{', '.join(short)} ({visible_words()})" if short else ""


def available_bytes() -> int:
    """Return the bytes that this process may still take.

    File cache counts as free, and the limits of a container are heeded.
    """

    def read_table(path: Path) -> dict[str, int]:
        return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}

    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # not Linux
        sizes.append(read_table(Path("/proc/meminfo"))["MemAvailable:"] * 1024)
    for folder, limit, used in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or the limit is "max"
            remaining = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            table = read_table(Path(folder, "memory.stat"))
            sizes.append(max(0, remaining + table.get("total_inactive_file", table.get("inactive_file", 0))))
    return min(sizes)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise ValueError if the disk of `folder` has less left than an index takes while it is built."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ValueError(
            f"{folder}: the index takes about {format_bytes(needed_bytes)} more while it is built, the disk "
            f"has {format_bytes(free)}: make room, or give another --save_dir"
        )


def check_fits(path: Path, num_bytes: int, advice: str) -> str:
    """Return a line about an index of which every search reads `num_bytes`.

    Raises ValueError if memory can't hold them.
    """
    free = available_bytes()
    size = f"{path}: {format_bytes(num_bytes)}, memory-mapped; {format_bytes(free)} of memory are available"
    if num_bytes > free:
        raise ValueError(f"the index doesn't fit, and every search reads all of it: {size}. {advice}")
    return size
