"""Vectors on disk: one flat array [N, D] of float16 or float32, whose rows are the rows of the corpus.

    corpus -> encoders (one for each GPU), or a file of vectors -> write_embeddings -> embeddings.f16 | .f32
           -> map_vectors -> np.ndarray [N, D], read from the file when it is touched

A build that was killed goes on after the last whole row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from search_r1.search.corpus import Corpus
from search_r1.search.long_work import Progress
from search_r1.search.manifest import read_manifest
from search_r1.search.memory import check_room

if TYPE_CHECKING:
    from search_r1.search.dense.encoder import Encoder

FILES = {"float16": "embeddings.f16", "float32": "embeddings.f32"}
STATE_FILE = "encoding.json"  # says from what the rows in the folder were made
# How many passages are sorted by length together. A kill loses at most so many.
CPU_WINDOW = 1024
GPU_WINDOW = 16 * 1024
COPY_ROWS = 16 * 1024


def map_vectors(path: Path, dtype: str, dimension: int, skip_bytes: int = 0) -> np.ndarray:
    """Return the rows [N, D] of a flat file, after `skip_bytes`, memory-mapped.

    Raises ValueError if the file's size is no whole number of rows, or 0.
    """
    row_bytes = np.dtype(dtype).itemsize * dimension
    size = (path.stat().st_size if path.is_file() else 0) - skip_bytes
    if size <= 0 or size % row_bytes:
        raise ValueError(f"{path} has {size:,} bytes, expected a multiple of {row_bytes} (a row of {dtype})")
    # Mode "c" makes an array that can be written to, as torch wants it. The file itself is never written.
    return np.memmap(path, dtype, "c", offset=skip_bytes).reshape(-1, dimension)


def open_embeddings(folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Return the parameters in the manifest of a finished exact index, and its vectors.

    Raises ValueError for a folder that is no such index.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"--index_path: {folder} has no manifest.json: it is no finished index of ours")
    parameters = manifest.parameters
    dtype = parameters["dtype"]
    dimension = parameters["dimension"]
    return parameters, map_vectors(folder / FILES[dtype], dtype, dimension)


def write_embeddings(
    corpus: Corpus,
    folder: Path,
    encoders: list[Encoder],
    dtype: str,
    progress: Progress,
    embedding_path: Path | None = None,
) -> dict[str, Any]:
    """Write the embeddings of all passages into `folder`, going on after a kill.

    Args:
        corpus: The passages.
        folder: A folder that exists.
        encoders: One for each device. Each works on other passages.
        dtype: float16 (half the size, and scores that differ in the 4th digit) or float32.
        progress: Is told how far the work is.
        embedding_path: Where the vectors are already: a flat float32 file [N, D], as Search-R1's
            `--save_embedding` writes it (emb_e5.memmap), or a FAISS Flat file (e5_Flat.index).

    Returns:
        The parameters for the manifest.

    Raises:
        ValueError: For vectors with NaN, for an embedding file of another size than corpus and encoder, and
            when the disk has no room.
    """
    settings = encoders[0].settings
    dimension = settings["dimension"]
    parameters = {"encoder": settings, "dtype": dtype, "dimension": dimension}
    state = json.dumps({"parameters": parameters, "corpus": corpus.fingerprint()}, sort_keys=True)
    path = folder / FILES[dtype]
    num_rows = 0
    row_bytes = np.dtype(dtype).itemsize * dimension
    if (folder / STATE_FILE).is_file() and (folder / STATE_FILE).read_text() == state and path.is_file():
        num_rows = path.stat().st_size // row_bytes
    (folder / STATE_FILE).write_text(state)
    check_room(folder, (len(corpus) - num_rows) * row_bytes)
    if embedding_path is None:
        source = _encode_from(corpus, encoders, num_rows)
    else:
        source = _stored_vectors(corpus, embedding_path, dimension, num_rows)
    with path.open("r+b" if num_rows else "wb") as file:
        file.truncate(num_rows * row_bytes)
        file.seek(0, os.SEEK_END)
        for vectors in source:
            with np.errstate(over="ignore"):
                stored = np.ascontiguousarray(vectors, dtype)
            is_finite = np.isfinite(stored).all(axis=1)
            if not is_finite.all():
                subject = f"the vector of passage {num_rows + int(np.argmin(is_finite))} (from 0)"
                raise ValueError(f"{subject} has NaN, or values too large for {dtype}")
            file.write(stored.data)
            file.flush()
            num_rows += len(stored)
            progress("encoding", num_rows, len(corpus))
    if num_rows != len(corpus):
        raise ValueError(f"{path} has {num_rows:,} rows, the corpus {len(corpus):,}: remove {folder}")
    return parameters


def _encode_from(corpus: Corpus, encoders: list[Encoder], start: int) -> Iterator[np.ndarray]:
    """Yield vectors of passages in order. The encoders work side by side on windows of passages."""
    size = GPU_WINDOW if encoders[0].device.type == "cuda" else CPU_WINDOW
    contents = corpus.iter_contents(start)
    windows = iter(lambda: list(islice(contents, size)), [])
    with ThreadPoolExecutor(len(encoders)) as threads:
        while group := list(islice(windows, len(encoders))):
            yield from threads.map(lambda encoder, texts: encoder.encode_passages(texts), encoders, group)


def _stored_vectors(corpus: Corpus, path: Path, dimension: int, start: int) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        header_bytes = 45 if file.read(4) == b"IxFI" else 0  # a FAISS Flat file (inner product)
    stored = map_vectors(path, "float32", dimension, header_bytes)
    if len(stored) != len(corpus):
        raise ValueError(
            f"--embedding_path: {path} holds {len(stored):,} vectors of {dimension} float32 values, "
            f"the corpus has {len(corpus):,} passages: they don't belong together"
        )
    for begin in range(start, len(stored), COPY_ROWS):
        yield stored[begin : begin + COPY_ROWS]
