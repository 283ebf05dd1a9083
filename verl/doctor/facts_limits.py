"""What this process may take of the machine: cores, memory, open files; control groups of both versions.

A limit may be set on any group between this process and the root (SLURM and systemd put jobs deep inside),
so each on the way up counts. Ray looks at the root alone; `seen_by_ray` does the same.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class Limits:
    """num_cpus, num_cpus_ray, memory_*: as in `Machine`."""

    num_cpus: float
    num_cpus_ray: float
    memory_bytes: int
    memory_limit_bytes: int | None
    memory_free_bytes: int
    open_files: tuple[int, int]


def look_at_limits(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Limits:
    """What this process may take now."""
    quotas = [quota for folder in _folders("cpu", cgroups, own) if (quota := _cpu_quota(folder))]
    memory = list(_memory_limits(cgroups, own))
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = min((limit for limit, _ in memory), default=None)
    return Limits(
        num_cpus=min([float(len(os.sched_getaffinity(0))), *quotas]),
        num_cpus_ray=seen_by_ray(cgroups),
        memory_bytes=total,
        memory_limit_bytes=limit,
        memory_free_bytes=min([available, *(free for _, free in memory)]),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


def seen_by_ray(cgroups: Path = CGROUPS) -> float:
    """The cores that a Ray started here would count: the machine's, or those of the root's control group."""
    roots = [quota for folder in (cgroups, cgroups / "cpu") if (quota := _cpu_quota(folder))]
    cpus = float(os.cpu_count() or 1)
    return float(math.floor(min(roots))) or 1.0 if roots else cpus


def _folders(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    """The groups of this process that may limit `controller`, its own first, the root last."""
    for line in _lines(own):
        _, names, path = line.split(":", 2)
        if names == "":
            roots = [cgroups, cgroups / "unified"]
        elif controller in names.split(","):
            roots = [cgroups / controller, cgroups / names]
        else:
            continue
        for root in dict.fromkeys(roots):
            folder = root / path.lstrip("/")
            while folder != root.parent:
                if folder.is_dir():
                    yield folder
                folder = folder.parent


def _cpu_quota(folder: Path) -> float | None:
    """Cores that a group allows."""
    text = (_text(folder / "cpu.max") or "").split()
    if len(text) != 2:
        text = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if not all(word.isdigit() for word in text) or int(text[1]) == 0:
        return None  # "max", or -1
    return int(text[0]) / int(text[1])


def _memory_limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of each group with a limit; file cache that can be dropped counts as free."""
    for folder in _folders("memory", cgroups, own):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield limit, max(0, limit - used + _cached(folder))


def _cached(folder: Path) -> int:
    values = dict(line.split() for line in _lines(folder / "memory.stat"))
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _meminfo(name: str) -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.isdigit() else None
