"""Download Search-R1's Wikipedia of 2018 (21 million passages) and its ready-made indexes, and unpack them.

    python -m data_prep.wiki18 --save_path data/wiki18                  corpus and e5 index, as Search-R1 does
    python -m data_prep.wiki18 --save_path data/wiki18 --what corpus    all that an index of your own needs

    corpus   wiki-18.jsonl.gz    5 GB  -> wiki-18.jsonl      14 GB
    e5       part_aa, part_ab   61 GB  -> e5_Flat.index      joined; the second part is on the disk twice
    hnsw     part_aa, part_ab          -> e5_HNSW64.index    the same
    bm25     bm25/*              2 GB  -> bm25/              a Lucene index

If it is stopped at any point, the same command continues.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

from data_prep.files import run_command
from data_prep.hub import fetch_file, fetch_folder

BLOCK_BYTES = 2**20
TAR_MAGIC = slice(257, 262)  # where a tar header says "ustar"
PARTS = ("part_aa", "part_ab")
ASSETS = {  # name -> (repository, its files, what they become)
    "corpus": ("PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), "wiki-18.jsonl"),
    "e5": ("PeterJinGo/wiki-18-e5-index", PARTS, "e5_Flat.index"),
    "hnsw": ("PeterJinGo/wiki-18-e5-index-HNSW64", PARTS, "e5_HNSW64.index"),
    "bm25": ("PeterJinGo/wiki-18-bm25-index", (), "bm25"),
}


def unpack(packed: Path, target: Path) -> None:
    """Write the .jsonl inside `packed` to `target`.

    The published wiki-18.jsonl.gz is a tar archive inside, whatever its name says; a plain one is read too.
    Raises ValueError if the file is broken, or if there is no corpus in it.
    """
    try:
        with gzip.open(packed, "rb") as stream, target.open("wb") as file:
            source: Any = stream
            if stream.peek(512)[TAR_MAGIC] == b"ustar":
                archive = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115 (its stream is closed below)
                members = (member for member in archive if member.name.endswith(".jsonl"))
                source = next(filter(None, map(archive.extractfile, members)), None)
                if source is None:
                    raise ValueError(f"{packed}: the archive in it holds no .jsonl file")
            shutil.copyfileobj(source, file, BLOCK_BYTES)
            while stream.read(BLOCK_BYTES):  # read to the end, where gzip checks the checksum
                pass
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{packed}: can't be unpacked ({error}); delete it to download it again") from None


def fetch(name: str, folder: Path) -> Path:
    """Return the file or folder that an asset becomes, in `folder`.

    Raises ValueError if something is refused, broken or missing.
    """
    repository, names, target_name = ASSETS[name]
    target = folder / target_name
    if not names:
        fetch_folder(repository, target_name, folder)
        return target
    if target.exists():
        return target
    parts_folder = folder / f"{target_name}.parts"
    # This file exists if a run was killed while it joined the parts. The number in its name is the size of
    # the first part, which it holds.
    begun = next(folder.glob(f"{target_name}.unfinished.*"), None)
    parts = []
    for path in names if begun is None else names[1:]:
        part = fetch_file(repository, path, parts_folder)
        if part is None:
            raise ValueError(f"{repository} has no {path}")
        parts.append(part)
    unfinished = begun or folder / f"{target_name}.unfinished"
    if name == "corpus":
        unpack(parts[0], unfinished)
    else:
        if begun is None:
            size = parts[0].stat().st_size
            # The first part is moved, so that it is not on the disk twice.
            unfinished = parts.pop(0).replace(folder / f"{target_name}.unfinished.{size}")
        with unfinished.open("r+b") as joined:
            joined.truncate(int(unfinished.suffix[1:]))
            joined.seek(0, 2)
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, joined, BLOCK_BYTES)
    unfinished.replace(target)
    shutil.rmtree(parts_folder)
    return target


def fetch_all(options: argparse.Namespace) -> None:
    names = [name.strip() for name in options.what.split(",")]
    if set(names) - ASSETS.keys():
        raise ValueError(f"--what: found {options.what!r}, expected some of {', '.join(ASSETS)}")
    for name in names:
        print(f"{fetch(name, options.save_path)}: ready", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save_path", type=Path, required=True, help="folder to write to")
    parser.add_argument("--what", default="corpus,e5", help=f"comma list of {', '.join(ASSETS)} (corpus,e5)")
    return run_command(parser, fetch_all, argv)


if __name__ == "__main__":
    sys.exit(main())
