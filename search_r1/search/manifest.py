"""The manifest of an index: what it was built from, so that it is never used with another corpus.

    builder -> write_manifest, the last thing written -> <folder>/manifest.json or <file>.manifest.json
    server  -> check_manifest(index, corpus): other corpus, other backend, half or damaged index -> ValueError
            -> MappedFiles.check() before each search: an index that was cut meanwhile -> IndexCut, not SIGBUS

The sizes of the files are checked at each start, their sums with --verify, and at each start for an index of
up to SMALL_INDEX bytes.
An index answers with row numbers. With another corpus these point at other passages, and nothing else would
tell. An index without a manifest was built elsewhere (Search-R1's FAISS files, Pyserini's folders). Then only
the numbers of documents can be compared.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.search.search_backend import RetrievalUnavailable
from verl.utils.file_sums import damage_by, sums_of

if TYPE_CHECKING:  # both need packages, which a program that only reads a manifest may not have yet
    from search_r1.search.corpus import Corpus
    from search_r1.search.long_work import Progress

FORMAT = 1
WORK_SUFFIX = ".building"
SMALL_INDEX = 2**30  # bytes; the sums of so many take about a second
COMPARED = ("num_documents", "num_bytes", "sample_sha256")


@dataclass(frozen=True)
class Manifest:
    """The facts about an index.

    Attributes:
        backend: "bm25", "lucene", "exact" or "faiss".
        corpus: `Corpus.fingerprint()`, and from the index builder also `sha256` (of the whole file) and
            `name`.
        parameters: What the backend says about itself (model, pooling, k1, ...).
        built: `files` (name: bytes) and `sums` (name: CRC-32 of each block), set by `write_manifest`. The
            index builder adds `seconds` and `command`.
    """

    backend: str
    corpus: dict[str, Any]
    parameters: dict[str, Any]
    built: dict[str, Any]


def manifest_path(index_path: str | Path) -> Path:
    """Return where the manifest of an index is: in a folder, beside a file."""
    path = Path(index_path)
    return path / "manifest.json" if path.is_dir() else path.with_name(path.name + ".manifest.json")


def write_manifest(index_path: str | Path, manifest: Manifest) -> None:
    """Write the manifest of a complete index atomically, with the sizes of the files that are there now."""
    index_path = Path(index_path)
    target = manifest_path(index_path)
    folder = index_path if index_path.is_dir() else index_path.parent
    files = sorted(index_path.rglob("*")) if index_path.is_dir() else [index_path]
    names = [
        path.relative_to(folder).as_posix()
        for path in files
        if path.is_file() and path != target and path.suffix not in (".lock", ".partial")
    ]
    sums = sums_of(folder, names)
    sizes = {name: entry["size"] for name, entry in sums.items()}
    blocks = {name: entry["crc32"] for name, entry in sums.items()}
    built = manifest.built | {"files": sizes, "sums": blocks}
    values = {"format": FORMAT} | asdict(manifest) | {"built": built}
    partial = target.with_name(target.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values | {"crc32": _sum_of(values)}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def _sum_of(values: dict[str, Any]) -> str:
    """Return the CRC-32 of a manifest's own values."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def read_manifest(index_path: str | Path) -> Manifest | None:
    """Return the manifest of an index, or None if there is none.

    Raises ValueError for a manifest that can't be read.
    """
    path = manifest_path(index_path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        expected_sum = values.pop("crc32", None)  # older versions wrote none
        if expected_sum is not None and expected_sum != _sum_of(values):
            raise ValueError("it is damaged: its sum is another")
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, this version reads format {FORMAT}")
        manifest = Manifest(**{field.name: values[field.name] for field in fields(Manifest)})
        if missing := [name for name in COMPARED if name not in manifest.corpus]:
            raise ValueError(f"it lacks the corpus's {missing[0]}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the manifest of an index ({error}); build the index again") from None
    return manifest


def check_manifest(
    index_path: str | Path,
    corpus: Corpus,
    expected_backend: str | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Manifest | None:
    """Raise ValueError unless the index is whole and was built for `corpus`.

    Args:
        index_path: The index.
        corpus: The corpus. It is compared by its `fingerprint`.
        expected_backend: The backend that the index must be for. None means any.
        full: Compare the hash of the whole corpus file, and the sums of all files of the index, as well
            (10 to 30 s for 14 GB).
        progress: Is told how far the hashing is.

    Returns:
        The manifest, or None if there is none.
    """
    index_path = Path(index_path)
    manifest = read_manifest(index_path)
    if manifest is None:
        return None
    if expected_backend is not None and manifest.backend != expected_backend:
        raise ValueError(
            f"{index_path} is an index for {manifest.backend}, expected one for {expected_backend}: "
            "give another --index_path, or the --retriever_name that it was built for"
        )
    check_files(index_path, manifest, full)
    fingerprint = corpus.fingerprint()
    is_same = all(manifest.corpus.get(name) == fingerprint[name] for name in COMPARED)
    if is_same and full:
        if "sha256" not in manifest.corpus:
            path = manifest_path(index_path)
            raise ValueError(f"{path}: has no hash of the whole corpus; build the index again")
        is_same = manifest.corpus["sha256"] == corpus.sha256(progress)
    if is_same:
        return manifest
    built, given = (
        f"{info['num_documents']:,} documents, {info['num_bytes']:,} bytes, hash {info['sample_sha256'][:12]}"
        for info in (manifest.corpus, fingerprint)
    )
    words = list(manifest.built.get("command") or [])
    remedy = "remove it, and start again"
    if "--corpus_path" in words[:-1]:
        words[words.index("--corpus_path") + 1] = str(corpus.path)
        remedy = f"`{shlex.join(words if '--overwrite' in words else [*words, '--overwrite'])}`"
    raise ValueError(
        f"{index_path} was built for the corpus {manifest.corpus.get('name', '(name not known)')} ({built}), "
        f"the corpus given is {corpus.path} ({given}). "
        f"Give the right one by --corpus_path, or build the index again: {remedy}"
    )


def check_files(index_path: Path, manifest: Manifest, full: bool = False) -> None:
    """Raise ValueError if a file of the index is missing, or is not what was written.

    Sizes are compared always. The content is compared if the index has at most SMALL_INDEX bytes, or with
    `full`.
    """
    folder = index_path if index_path.is_dir() else index_path.parent
    sizes: dict[str, int] = manifest.built.get("files", {})
    for name, size in sizes.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,} bytes"
            raise ValueError(
                f"{index_path}: the index is not whole, {name} {state}, expected {size:,} bytes. "
                "Copy it again, or build it again with --overwrite"
            )
    if not full and sum(sizes.values()) > SMALL_INDEX:
        return
    sums: dict[str, list[str]] = manifest.built.get("sums", {})
    if full and not sums:
        print(
            f"note: {index_path} has no sums (an older version built it): its sizes alone are compared",
            file=sys.stderr,
            flush=True,
        )
    damage = damage_by(folder, {name: (sizes[name], blocks) for name, blocks in sums.items()})
    if damage is not None:
        raise ValueError(
            f"{index_path}: the index is damaged, {damage}. Copy it again, or build it again with --overwrite"
        )


class IndexCut(RetrievalUnavailable):
    """An error of an index whose files were cut while a server had them open."""


class MappedFiles:
    """The files that a server has mapped: reading beyond their end would kill the process (SIGBUS).

    The files are held open, so another index that takes their names changes nothing.

    Args:
        files: The files. Those that do not exist are left out.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [path.open("rb") for path in files if path.is_file()]
        self._sizes = [os.fstat(file.fileno()).st_size for file in self._files]

    def check(self) -> None:
        """Raise IndexCut if a file is shorter than it was; it takes about a microsecond a file."""
        for file, size in zip(self._files, self._sizes, strict=True):
            actual = os.fstat(file.fileno()).st_size
            if actual < size:
                raise IndexCut(
                    f"{file.name} was cut while it was served: found {actual:,} bytes, expected {size:,}. "
                    "Copy the index again, and start the server again"
                )

    def close(self) -> None:
        for file in self._files:
            file.close()
