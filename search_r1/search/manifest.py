"""The manifest of an index: what it was built from, so that it is never used with another corpus.

    builder -> write_manifest, the last thing written -> <folder>/manifest.json or <file>.manifest.json
    server  -> check_manifest(index, corpus): other corpus, other backend, half an index -> ValueError

An index answers with row numbers. With another corpus these point at other passages, and nothing else would
tell. An index without a manifest was built elsewhere (Search-R1's FAISS files, Pyserini's folders). Then only
the numbers of documents can be compared.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both need packages, which a program that only reads a manifest may not have yet
    from search_r1.search.corpus import Corpus
    from search_r1.search.long_work import Progress

FORMAT = 1
WORK_SUFFIX = ".building"
COMPARED = ("num_documents", "num_bytes", "sample_sha256")


@dataclass(frozen=True)
class Manifest:
    """The facts about an index.

    Attributes:
        backend: "bm25", "lucene", "exact" or "faiss".
        corpus: `Corpus.fingerprint()`, and from the index builder also `sha256` (of the whole file) and
            `name`.
        parameters: What the backend says about itself (model, pooling, k1, ...).
        built: `files` (name: bytes), set by `write_manifest`. The index builder adds `seconds` and `command`.
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
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in files
        if path.is_file() and path != target and path.suffix not in (".lock", ".partial")
    }
    built = manifest.built | {"files": sizes}
    partial = target.with_name(target.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT} | asdict(manifest) | {"built": built}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def read_manifest(index_path: str | Path) -> Manifest | None:
    """Return the manifest of an index, or None if there is none.

    Raises ValueError for a manifest that can't be read.
    """
    path = manifest_path(index_path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
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
        full: Compare the hash of the whole corpus file as well (10 to 30 s for 14 GB).
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
    check_files(index_path, manifest)
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


def check_files(index_path: Path, manifest: Manifest) -> None:
    """Raise ValueError if a file of the index is missing or has another size than was written."""
    folder = index_path if index_path.is_dir() else index_path.parent
    for name, size in manifest.built.get("files", {}).items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,} bytes"
            raise ValueError(
                f"{index_path}: the index is not whole, {name} {state}, expected {size:,} bytes. "
                "Copy it again, or build it again with --overwrite"
            )
