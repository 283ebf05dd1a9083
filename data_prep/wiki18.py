"""Downloads Search-R1's Wikipedia of 2018 (21 million passages) and its ready-made indexes, and unpacks them.

    python -m data_prep.wiki18 --save_path data/wiki18                  corpus and e5 index, as Search-R1 does
    python -m data_prep.wiki18 --save_path data/wiki18 --what corpus    all that an index of our own needs

    corpus   wiki-18.jsonl.gz    5 GB  -> wiki-18.jsonl      14 GB
    e5       part_aa, part_ab   61 GB  -> e5_Flat.index      joined as they arrive
    hnsw     part_aa, part_ab          -> e5_HNSW64.index    joined as they arrive
    bm25     bm25/*              2 GB  -> bm25/              a Lucene index

Stopped at any point, the same command goes on. Each large file is checked against the hub's checksum. Before
anything starts, what is needed is compared with the free space. HF_ENDPOINT, HF_TOKEN and the proxy variables
of the environment count.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.hub import BLOCK_BYTES, RemoteFile, Report, fetch_joined, fetched_bytes, hub_api, list_files

DEFAULT_ENDPOINT = "https://huggingface.co"
TAR_MAGIC = slice(257, 262)  # where a tar header says "ustar"


@dataclass(frozen=True)
class Asset:
    """What to fetch. `files` are joined into `target`; without them, everything under the folder `target`.

    `unpacked_bytes`: size of the .jsonl inside a .gz, for the check of the disk; 0: nothing is unpacked.
    """

    repository: str
    target: str
    files: tuple[str, ...] = ()
    unpacked_bytes: int = 0


ASSETS = {
    "corpus": Asset(
        "PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", ("wiki-18.jsonl.gz",), unpacked_bytes=14_393_573_105
    ),
    "e5": Asset("PeterJinGo/wiki-18-e5-index", "e5_Flat.index", ("part_aa", "part_ab")),
    "hnsw": Asset("PeterJinGo/wiki-18-e5-index-HNSW64", "e5_HNSW64.index", ("part_aa", "part_ab")),
    "bm25": Asset("PeterJinGo/wiki-18-bm25-index", "bm25"),
}


@dataclass(frozen=True)
class Job:
    """One file to write: the parts that make it, and what it is unpacked to, if it is."""

    parts: list[RemoteFile]
    target: Path
    unpacked: Path | None = None
    unpacked_bytes: int = 0

    @property
    def is_done(self) -> bool:
        return (self.unpacked or self.target).exists()

    @property
    def bytes_to_fetch(self) -> int:
        """What is still missing on the disk."""
        if self.is_done:
            return 0
        if self.target.exists():
            return 0
        twice = max((part.size for part in self.parts), default=0)  # a part lies beside the file it joins
        return max(sum(part.size for part in self.parts) + twice - fetched_bytes(self.target), 0)


def plan(asset: Asset, files: list[RemoteFile], folder: Path) -> list[Job]:
    """The files that an asset becomes. Raises ValueError if the repository lacks one."""
    by_path = {file.path: file for file in files}
    if not asset.files:
        inside = [file for file in files if file.path.startswith(f"{asset.target}/")]
        if not inside:
            raise ValueError(f"{asset.repository} has no folder {asset.target}; it holds {sorted(by_path)}")
        return [Job([file], folder / file.path) for file in inside]
    missing = [name for name in asset.files if name not in by_path]
    if missing:
        raise ValueError(f"{asset.repository} has no {', '.join(missing)}; it holds {sorted(by_path)}")
    target = folder / asset.target
    unpacked = target.with_suffix("") if asset.unpacked_bytes else None
    return [Job([by_path[name] for name in asset.files], target, unpacked, asset.unpacked_bytes)]


def check_disk(jobs: list[Job], folder: Path) -> None:
    """Raises ValueError if the disk can't take all jobs; a packed file goes as soon as it is unpacked."""
    used = peak = 0
    for job in jobs:
        if job.is_done:
            continue
        peak = max(peak, used + job.bytes_to_fetch + job.unpacked_bytes)
        used += job.unpacked_bytes or job.bytes_to_fetch
    free = shutil.disk_usage(folder).free
    if peak > free:
        raise ValueError(
            f"{folder}: {peak / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; make room, or "
            "choose another folder with --save_path or less with --what"
        )


def unpack(packed: Path, target: Path, report: Report) -> None:
    """Writes the .jsonl inside `packed` to `target` and removes `packed`.

    The published wiki-18.jsonl.gz is a tar archive inside, whatever its name says; a plain one is read too.
    Raises ValueError for a broken file, or where there is no corpus in it; `packed` stays then.
    """
    temporary = target.with_name(target.name + ".unpacking")
    try:
        with gzip.open(packed, "rb") as stream, temporary.open("wb") as file:
            source: Any = stream
            if stream.peek(512)[TAR_MAGIC] == b"ustar":
                archive = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115 (its stream is closed below)
                members = (member for member in archive if member.name.endswith(".jsonl"))
                source = next(filter(None, map(archive.extractfile, members)), None)
                if source is None:
                    raise ValueError(f"{packed}: the archive in it holds no .jsonl file")
            report(f"unpacking {packed}")
            shutil.copyfileobj(source, file, BLOCK_BYTES)
            while stream.read(BLOCK_BYTES):  # to the end: there gzip has its checksum
                pass
            file.flush()
            os.fsync(file.fileno())
        _check_first_line(temporary, packed)
        temporary.replace(target)
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{packed}: can't be unpacked ({error}); delete it to download it again") from None
    except OSError as error:
        raise ValueError(f"{temporary}: can't be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
    packed.unlink()


def _check_first_line(path: Path, packed: Path) -> None:
    with path.open("rb") as lines:
        first = lines.readline(BLOCK_BYTES)
    try:
        fields = json.loads(first)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "contents" not in fields:
        raise ValueError(f"{packed}: is no corpus; its first line begins with {first[:60]!r}")


def prepare(folder: Path, names: list[str], api: Any, revision: str, report: Report) -> None:
    """Downloads and unpacks the assets. Raises ValueError where something is refused, broken or too large."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = []
    for name in names:
        jobs += plan(ASSETS[name], list_files(api, ASSETS[name].repository, revision), folder)
    check_disk(jobs, folder)
    report(f"{sum(job.bytes_to_fetch for job in jobs) / 1e9:.2f} GB to download to {folder}")
    for job in jobs:
        if not job.is_done:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            fetch_joined(api, job.parts, job.target, report)
            if job.unpacked is not None:
                unpack(job.target, job.unpacked, report)
        elif job.unpacked is not None:
            job.target.unlink(missing_ok=True)  # killed between unpacking and this
        report(f"{job.unpacked or job.target}: ready")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save_path", type=Path, required=True, help="folder to write to")
    parser.add_argument("--what", default="corpus,e5", help=f"comma list of {', '.join(ASSETS)} (corpus,e5)")
    parser.add_argument("--revision", default="main", help="branch or commit of the repositories (main)")
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.what.split(",") if name.strip()]
    endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    try:
        unknown = [name for name in names if name not in ASSETS]
        if unknown or not names:
            raise ValueError(f"--what: found {options.what!r}, expected some of {', '.join(ASSETS)}")
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"HF_ENDPOINT: found {endpoint!r}, expected an address like {DEFAULT_ENDPOINT}")
        report = lambda line: print(line, flush=True)  # noqa: E731
        prepare(options.save_path, names, hub_api(endpoint), options.revision, report)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
