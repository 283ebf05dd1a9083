"""Files that outlast a crash of the machine: they are forced to the disk before they get their names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Force a folder and everything below it to the disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def free_name(path: Path, reason: str = "old") -> Path:
    """Return the first of `<path>.<reason>-1`, `<path>.<reason>-2`, ... that no file has."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    return candidate
