"""Vectors on disk: one flat array [N, D] of float16 or float32, read by memory map.

    EmbeddingWriter.append(vectors), ... -> embeddings.f16 | embeddings.f32 -> Embeddings.rows(...) -> float32

The writer says how many rows are safely on disk, so a build that was killed goes on from there.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

FILES = {"float16": "embeddings.f16", "float32": "embeddings.f32"}


class Embeddings:
    """Read access to stored vectors. `shape`: (N, D). Nothing is in memory but what the system caches."""

    def __init__(self, path: Path, dtype: str, dimension: int, skip_bytes: int = 0) -> None:
        """Opens a flat file of rows, which begin after `skip_bytes`.

        Raises ValueError when its size is no whole number of rows, or 0.
        """
        self.path, self.dtype, self.dimension = path, dtype, dimension
        row_bytes = np.dtype(dtype).itemsize * dimension
        size = path.stat().st_size if path.is_file() else 0
        size -= skip_bytes
        if size <= 0 or size % row_bytes:
            raise ValueError(
                f"{path} has {size:,} bytes, expected a multiple of {row_bytes} (a row of {dtype})"
            )
        # "c": nothing is ever written, but torch takes only arrays that could be.
        self.array = np.memmap(path, dtype, "c", offset=skip_bytes).reshape(-1, dimension)

    @classmethod
    def open(cls, folder: Path, dtype: str, dimension: int) -> Embeddings:
        """Opens the file that EmbeddingWriter wrote into `folder`."""
        return cls(folder / FILES[dtype], dtype, dimension)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.array), self.dimension

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def __len__(self) -> int:
        return len(self.array)

    def rows(self, which: slice | np.ndarray) -> np.ndarray:
        """A float32 copy [n, D] of some rows."""
        return np.asarray(self.array[which]).astype(np.float32)


def flat_header_bytes(path: Path) -> int:
    """Bytes before the vectors of a FAISS Flat file (inner product); 0 for a bare array."""
    with path.open("rb") as file:
        return 45 if file.read(4) == b"IxFI" else 0


class EmbeddingWriter:
    """Appends rows to a file in `folder`; `num_rows` of them are there already after a kill."""

    def __init__(self, folder: Path, dtype: str, dimension: int) -> None:
        """Goes on after the last whole row that was flushed (the file may end inside a row)."""
        self.path, self.dtype, self.dimension = folder / FILES[dtype], np.dtype(dtype), dimension
        row_bytes = self.dtype.itemsize * dimension
        size = self.path.stat().st_size if self.path.is_file() else 0
        self.num_rows = size // row_bytes
        self._file = self.path.open("r+b" if size else "wb")
        self._file.truncate(self.num_rows * row_bytes)
        self._file.seek(0, os.SEEK_END)

    def append(self, vectors: np.ndarray) -> None:
        """Adds float32 rows [n, D]. Raises ValueError with the row for values that aren't finite numbers."""
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(vectors, self.dtype)
        good = np.isfinite(stored).all(axis=1)
        if not good.all():
            row = self.num_rows + int(np.argmin(good))
            raise ValueError(
                f"the vector of passage {row} (from 0) has NaN, or values too large for {self.dtype}"
            )
        self._file.write(stored.data)
        self._file.flush()
        self.num_rows += len(stored)

    def close(self) -> None:
        """Everything is on the disk after this."""
        os.fsync(self._file.fileno())
        self._file.close()
