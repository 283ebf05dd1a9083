"""A corpus: one JSON object a line, `{"id": "7", "contents": "\\"Title\\"\\ntext", ...}`, read by row number.

    corpus.jsonl(.gz, .bz2) -> Corpus.open -> rows([5, 2]) -> [Document, Document]  the lines' bytes, by pread
                                     -> iter_contents() -> str, str, ...         for index builders

Only the positions where rows begin are in memory, and those are memory-mapped. A server sends the bytes of a
line as they are, so each line passes `parse_line` first: at `open` for a file of up to CHECK_BYTES, else at
each use (a microsecond). A broken line is an error that names it. If it were skipped, the rows of an index
would shift.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from search_r1.search.corpus_files import (
    BYTE_ORDER_MARK,
    PACKED_SUFFIXES,
    check_beginning,
    find_rows,
    unpack,
)
from search_r1.search.long_work import Progress
from search_r1.search.search_backend import Document

CHECK_BYTES = 256 * 2**20  # a file up to here is checked whole when it is opened, in about a second
READ_BYTES = 8 * 2**20
FINGERPRINT_BLOCKS = 512
FINGERPRINT_BLOCK_BYTES = 128 * 2**10
EXAMPLE = '{"id": "7", "contents": "\\"Title\\"\\ntext"}'


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the fields of one line.

    Raises ValueError with the reason for a line that a client couldn't read. Such a line is not UTF-8, or no
    object with `contents` as a string, or it has NaN, Infinity, a number that overflows a double, half of a
    surrogate pair ("\\ud83d" alone) or a byte order mark.
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if line.startswith(BYTE_ORDER_MARK):
            problem = "begins with a byte order mark inside the file (several files joined?); remove it"
        else:
            problem = f"not valid JSON ({error.msg} at column {error.colno})"
            try:
                line.decode()
            except UnicodeDecodeError as mistake:
                byte = line[mistake.start]
                problem = (
                    f"not valid JSON: the byte {byte:#x} at column {mistake.start + 1} is no UTF-8; "
                    "expected UTF-8. A file in Latin-1: iconv -f LATIN1 -t UTF-8"
                )
        raise ValueError(problem) from None
    if type(fields) is not dict:
        raise ValueError(f"found a JSON {type(fields).__name__}, expected an object: {EXAMPLE}")
    if "contents" in fields and type(fields["contents"]) is not str:
        kind = type(fields["contents"]).__name__
        raise ValueError(f"found 'contents' of the type {kind}, expected the text as one string: {EXAMPLE}")
    if "contents" not in fields:
        names = ", ".join(map(repr, list(fields)[:8])) or "no fields"
        raise ValueError(f"expected the text as one string under 'contents', found {names}: {EXAMPLE}")
    return fields


class Corpus:
    """Random access to the lines of a corpus. Any number of threads may use it at once.

    Example: Corpus.open("wiki-18.jsonl").rows([0])[0].contents
    """

    def __init__(self, file: IO[bytes], starts: np.ndarray, num_blank_lines: int, path: Path) -> None:
        """Wrap an open file. Use `open` instead.

        `find_rows` describes `starts` and `num_blank_lines`.
        """
        self._file = file
        self.starts = starts
        self.num_blank_lines = num_blank_lines
        self.path = path
        self.num_bytes = int(starts[-1])
        self._is_checked = False

    @classmethod
    def open(cls, path: str | Path, progress: Progress | None = None, check: bool = True) -> Corpus:
        """Open a .jsonl file, or a .jsonl.gz or .jsonl.bz2 file, which is unpacked once beside itself.

        The first time, the file is read once to find the lines (about a second per GB). The result is kept in
        `<path>.offsets.npy`.

        Args:
            path: The file.
            progress: Is told how far the reading is.
            check: Check every line of a file of up to CHECK_BYTES.

        Raises:
            ValueError: For a file that can't be read or has no documents, and with `check` for a broken line.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"--corpus_path: there is no file {path}")
        try:
            path = unpack(path, progress) if path.suffix in PACKED_SUFFIXES else path
            check_beginning(path)
            file = path.open("rb", buffering=0)
        except OSError as error:
            raise ValueError(f"--corpus_path: can't read {path} ({error.strerror})") from None
        corpus = cls(file, *find_rows(path, progress), path)
        if check and corpus.num_bytes <= CHECK_BYTES:
            for _ in corpus.iter_contents():
                pass
            corpus._is_checked = True  # so that `rows` need not check again
        return corpus

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Nothing may be read afterwards.

        It may be called twice.
        """
        self._file.close()

    def rows(self, numbers: Sequence[int] | np.ndarray) -> list[Document]:
        """Return the documents of these rows, in this order.

        Raises:
            IndexError: For a row that isn't there, also for a negative one.
            ValueError: For a broken line, and for a file that was changed since it was opened.
        """
        start_of = self.starts.item
        num_rows = len(self)
        documents = []
        for number in numbers:
            row = int(number)
            if not 0 <= row < num_rows:
                raise IndexError(f"row {row}: the corpus has rows 0 to {num_rows - 1}")
            line = _read(self._file, start_of(row), start_of(row + 1)).strip(b" \t\r\n")
            if not self._is_checked:
                self._parse(row, line)
            if not line.startswith(b"{") or not line.endswith(b"}") or b"\n" in line:
                position = f"{self.path}, line {self.line_number(row)}"
                raise ValueError(f"{position}: no JSON object any more; the file was changed while in use")
            documents.append(Document(line, row))
        return documents

    def _parse(self, row: int, line: bytes) -> dict[str, Any]:
        try:
            return parse_line(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {self.line_number(row)}: {error}") from None

    def line_number(self, row: int) -> int:
        """Return the line number of a row, from 1 on.

        If there are blank lines, the file is read up to the row.
        """
        if not self.num_blank_lines:
            return row + 1
        start = int(self.starts[row])
        blocks = (_read(self._file, at, min(at + READ_BYTES, start)) for at in range(0, start, READ_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (row, bytes) for the rows from `start` up to `stop`.

        The file is read in large blocks, and nothing is checked.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        while start < stop:
            limit = self.starts[start] + np.uint64(READ_BYTES)  # with an int NumPy would copy all to float64
            block_stop = int(np.searchsorted(self.starts, limit, side="right")) - 1
            block_stop = min(max(block_stop, start + 1), stop)
            begin = int(self.starts[start])
            block = _read(self._file, begin, int(self.starts[block_stop]))
            ends = (self.starts[start : block_stop + 1] - self.starts[start]).tolist()
            for row in range(start, block_stop):
                yield row, block[ends[row - start] : ends[row - start + 1]]
            start = block_stop

    def iter_contents(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Yield the `contents` of the rows from `start` up to `stop`.

        Raises ValueError that names a broken line.
        """
        for row, line in self.lines(start, stop):
            yield self._parse(row, line)["contents"]

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells this corpus from another: counts, and a SHA-256 of evenly spaced blocks.

        It takes a moment. A file of up to 64 MiB is read whole. Of a larger one 512 blocks of 128 KiB are
        read. There, a letter that was changed for another is only seen if it lies in one of the blocks.
        """
        sample = _sample_sha256(self._file, self.num_bytes)
        return {"num_documents": len(self), "num_bytes": self.num_bytes, "sample_sha256": sample}

    def sha256(self, progress: Progress | None = None) -> str:
        """Return the SHA-256 of the whole file (1 to 2 GB per second)."""
        digest = hashlib.sha256()
        for begin in range(0, self.num_bytes, READ_BYTES):
            stop = min(begin + READ_BYTES, self.num_bytes)
            digest.update(_read(self._file, begin, stop))
            if progress is not None:
                progress("hashing the corpus (bytes)", stop, self.num_bytes)
        return digest.hexdigest()


def file_identity(path: str | Path) -> dict[str, Any]:
    """Return the size of a corpus file, and its hash as in `fingerprint`, without finding its lines.

    For x.jsonl.gz and x.jsonl.bz2 they are those of x.jsonl, which a server unpacks beside it. Raises OSError
    for a file that can't be read.
    """
    path = Path(path)
    with (path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return {"num_bytes": size, "sample_sha256": _sample_sha256(file, size)}


def _sample_sha256(file: IO[bytes], num_bytes: int) -> str:
    width = FINGERPRINT_BLOCK_BYTES
    begins = [0]
    if num_bytes <= FINGERPRINT_BLOCKS * width:
        width = num_bytes
    else:
        begins = np.linspace(0, num_bytes - width, FINGERPRINT_BLOCKS, dtype=np.int64).tolist()
    digest = hashlib.sha256()
    for begin in begins:
        digest.update(_read(file, begin, begin + width))
    return digest.hexdigest()


def _read(file: IO[bytes], start: int, stop: int) -> bytes:
    data = os.pread(file.fileno(), stop - start, start)
    while len(data) < stop - start:  # one call reads at most 2 GiB
        more = os.pread(file.fileno(), stop - start - len(data), start + len(data))
        if not more:
            raise ValueError(f"the corpus file was cut short since it was opened (byte {stop} is gone)")
        data += more
    return data
