"""Sums of the files in a folder: what a disk, a copy or a hand has changed is found before it is read.

    writer: files -> write_sums(folder), the last thing written -> <folder>/SUMS.json
    reader: damage_in(folder) -> None, or what is wrong, with the name of the file

A file has its size and one CRC-32 for every BLOCK bytes. A CRC-32 finds each flipped bit, and is computed
about three times as fast as a cryptographic hash: it is against accidents. Whoever can write into the folder
can write SUMS.json, too. Threads compute the sums, because zlib releases the GIL.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

SUMS_FILE = "SUMS.json"
FORMAT = 1
BLOCK = 2**26  # bytes under one sum: so many of a large file are read by different threads
READ_SIZE = 2**18  # bytes that are in memory at once for each thread; they fit into a core's cache
MOST_THREADS = 8


def stays_inside(name: str) -> bool:
    """Return whether a relative name from outside can only mean a file below its folder."""
    path = PurePosixPath(name)
    is_plain = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return is_plain and "\\" not in name and "\0" not in name


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the size and the sums of files below a folder, by their names.

    Raises OSError if a file can't be read.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    blocks = [(folder / name, start) for name, size in sizes.items() for start in range(0, size, BLOCK)]
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "sums") as threads:
        sums = threads.map(lambda block: _sum_of_block(*block), blocks)
        return {
            name: {"size": size, "crc32": [next(sums) for _ in range(0, size, BLOCK)]}
            for name, size in sizes.items()
        }


def _sum_of_block(path: Path, start: int) -> str:
    """Return the CRC-32 of one block of a file, as eight hexadecimal digits."""
    value = 0
    buffer = memoryview(bytearray(READ_SIZE))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = BLOCK
        while left and (count := file.readinto(buffer[: min(left, READ_SIZE)])):
            value = zlib.crc32(buffer[:count], value)
            left -= count
    return f"{value:08x}"


def files_below(folder: Path) -> Iterator[str]:
    """Yield the names of all files below a folder, relative to it and in order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def write_sums(folder: Path) -> None:
    """Write the sums of all files below a folder into SUMS.json, in one step, and force it to the disk."""
    files = sums_of(folder, [name for name in files_below(folder) if name != SUMS_FILE])
    partial = folder / f"{SUMS_FILE}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / SUMS_FILE)


def damage_in(folder: Path, below: str = "") -> str | None:
    """Say what is wrong with the files of a folder by its SUMS.json; return None if nothing is.

    A folder without sums has None, too: see `has_sums`. Files that SUMS.json does not name are not looked at.

    Args:
        folder: the folder with SUMS.json.
        below: look only at files whose names begin with this.
    """
    try:
        files = json.loads((folder / SUMS_FILE).read_text(encoding="utf-8"))["files"]
        expected = {name: (int(entry["size"]), list(entry["crc32"])) for name, entry in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{SUMS_FILE} can't be read ({type(error).__name__}: {error})"
    if outside := [name for name in expected if not stays_inside(name)]:
        return f"{SUMS_FILE} names {outside[0]!r}, which is not a file below the folder"
    return damage_by(folder, {name: sums for name, sums in expected.items() if name.startswith(below)})


def damage_by(folder: Path, expected: Mapping[str, tuple[int, list[str]]]) -> str | None:
    """Say which file differs from its size and sums; return None if none does."""
    for name, (size, _) in expected.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != size:
            return f"{name} has {actual:,} bytes; expected {size:,}"
    try:
        sums = sums_of(folder, expected)
    except OSError as error:
        return f"a file can't be read: {error}"
    for name, (_, blocks) in expected.items():
        for number, (actual_sum, expected_sum) in enumerate(zip_longest(sums[name]["crc32"], blocks)):
            if actual_sum != expected_sum:
                begin = number * BLOCK
                return f"{name} is damaged: its sum from byte {begin:,} on is not that of {SUMS_FILE}"
    return None


def has_sums(folder: Path) -> bool:
    """Return whether a folder has a SUMS.json."""
    return (folder / SUMS_FILE).is_file()
