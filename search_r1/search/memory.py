"""How much memory this process may still take, and sizes for people."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that this process may still take: file cache counts as free, limits of a container are heeded."""
    limits = [
        _meminfo(),
        _cgroup(CGROUP, "memory.max", "memory.current"),
        _cgroup(CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    return min(size for size in limits if size is not None)


def format_bytes(size: float) -> str:
    """For people: "3.2 GB" (10^9 bytes)."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def check_fits(path: Path, num_bytes: int, advice: str) -> str:
    """A line about an index of which every search reads `num_bytes`. Raises ValueError when memory can't hold
    them."""
    free = available_bytes()
    size = f"{path}: {format_bytes(num_bytes)}, memory-mapped; {format_bytes(free)} of memory are available"
    if num_bytes > free:
        raise ValueError(f"the index doesn't fit, and every search reads all of it: {size}. {advice}")
    return size


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _cgroup(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
    if limit is None or used is None:
        return None
    cached = 0
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                cached = int(line.split()[1])
    except OSError:
        pass
    return max(0, limit - used + cached)
