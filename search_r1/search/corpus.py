"""A corpus: one JSON object a line, `{"id": "7", "contents": "\\"Title\\"\\ntext", ...}`, read by row number.

    corpus.jsonl(.gz) -> Corpus.open -> rows([5, 2]) -> [Document, Document]     the lines' bytes, by pread
                                     -> iter_contents() -> str, str, ...         for index builders

In memory is only where the rows begin, and that memory-mapped. What a server sends are the bytes of the line,
so a line has to be right before it is sent. `parse_line` says what right means, and each line passes it:
at `open` for a file of up to CHECK_BYTES, else at each use (a microsecond).
A line that is dropped or shifted would make an index answer with the wrong passage; so lines are never
skipped, except blank ones, and a broken one is an error that names it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from search_r1.search.corpus_files import BYTE_ORDER_MARK, Progress, find_rows, unpack_gzip
from search_r1.search.retriever import Document

CHECK_BYTES = 256 * 2**20  # files up to here are checked whole when they are opened, in about a second
READ_BYTES = 8 * 2**20
FINGERPRINT_BLOCKS, FINGERPRINT_BLOCK_BYTES = 512, 128 * 2**10
EXAMPLE = '{"id": "7", "contents": "\\"Title\\"\\ntext"}'


def parse_line(line: bytes) -> dict[str, Any]:
    """The fields of one line. Raises ValueError with the reason when it may not be in a corpus.

    Refused, because a client couldn't read the reply: what is not UTF-8, NaN, Infinity and numbers that
    overflow a double, half of a surrogate pair ("\\ud83d" alone), a byte order mark, an object without
    `contents` as a string.
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if line.startswith(BYTE_ORDER_MARK):
            problem = "begins with a byte order mark inside the file (several files joined?); remove it"
        else:
            problem = f"not valid JSON ({error.msg} at column {error.colno})"
        raise ValueError(problem) from None
    if type(fields) is not dict:
        raise ValueError(f"found a JSON {type(fields).__name__}, expected an object: {EXAMPLE}")
    if type(fields.get("contents")) is not str:
        names = ", ".join(map(repr, list(fields)[:8])) or "no fields"
        raise ValueError(f"expected the text as one string under 'contents', found {names}: {EXAMPLE}")
    return fields


class Corpus:
    """Random access to the lines of a corpus. Any number of threads may use it at once.

    Example: Corpus.open("wiki-18.jsonl").rows([0])[0].contents
    """

    def __init__(self, file: IO[bytes], starts: np.ndarray, num_blank_lines: int, path: Path | None) -> None:
        """Use `open` or `from_documents`. `starts`, `num_blank_lines`: see `find_rows`."""
        self._file, self.starts, self.num_blank_lines, self.path = file, starts, num_blank_lines, path
        self.num_bytes = int(starts[-1])
        self._is_checked = False

    @classmethod
    def open(cls, path: str | Path, progress: Progress | None = None, check: bool = True) -> Corpus:
        """Opens a .jsonl file, or a .jsonl.gz file, which is unpacked once beside itself.

        The first time it is read once to find the lines (about a second per GB); this is kept in
        `<path>.offsets.npy`. Raises ValueError with the line number for a broken line (see the top of this
        file for when; not without `check`), for a file that can't be read and for one without documents.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"--corpus_path: there is no file {path}")
        try:
            path = unpack_gzip(path, progress) if path.suffix == ".gz" else path
            file = path.open("rb", buffering=0)
        except OSError as error:
            raise ValueError(f"--corpus_path: can't read {path} ({error.strerror})") from None
        corpus = cls(file, *find_rows(path, progress), path)
        if check and corpus.num_bytes <= CHECK_BYTES:
            corpus.check_all()
        return corpus

    @classmethod
    def from_documents(cls, documents: Sequence[dict[str, Any]]) -> Corpus:
        """A corpus in a temporary file. Raises ValueError for none, and for what `parse_line` refuses."""
        if not documents:
            raise ValueError("the corpus has no documents")
        lines = [Document.from_fields(fields).json + b"\n" for fields in documents]
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open while the corpus is
        file.write(b"".join(lines))
        corpus = cls(file, np.cumsum([0, *map(len, lines)], dtype=np.uint64), 0, None)
        corpus.check_all()
        return corpus

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. May be called twice; nothing may be read after it."""
        self._file.close()

    def _read(self, start: int, stop: int) -> bytes:
        return _read_file(self._file.fileno(), start, stop)

    def rows(self, numbers: Sequence[int] | np.ndarray) -> list[Document]:
        """The documents of these rows, in this order; a row may come several times.

        Raises IndexError for a row that isn't there (also a negative one), ValueError for a broken line and
        for a file that was changed since it was opened.
        """
        start_of, num_rows = self.starts.item, len(self)
        documents = []
        for number in numbers:
            row = int(number)
            if not 0 <= row < num_rows:
                raise IndexError(f"row {row}: the corpus has rows 0 to {num_rows - 1}")
            line = self._read(start_of(row), start_of(row + 1)).strip(b" \t\r\n")
            if not self._is_checked:
                self._parse(row, line)
            if not line.startswith(b"{") or not line.endswith(b"}") or b"\n" in line:
                raise ValueError(
                    f"{self.where(row)}: no JSON object any more; the file was changed while in use"
                )
            documents.append(Document(line, row))
        return documents

    def _parse(self, row: int, line: bytes) -> dict[str, Any]:
        try:
            return parse_line(line)
        except ValueError as error:
            raise ValueError(f"{self.where(row)}: {error}") from None

    def line_number(self, row: int) -> int:
        """From 1 on. Where lines are blank, the file is read up to the row."""
        if not self.num_blank_lines:
            return row + 1
        start = int(self.starts[row])
        blocks = (self._read(at, min(at + READ_BYTES, start)) for at in range(0, start, READ_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)

    def where(self, row: int) -> str:
        """File and line of a row, for messages: "corpus.jsonl, line 7"."""
        return f"document {row}" if self.path is None else f"{self.path}, line {self.line_number(row)}"

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The bytes of the rows from `start` up to `stop`, read in large blocks. Nothing is checked."""
        stop = len(self) if stop is None else min(stop, len(self))
        while start < stop:
            limit = self.starts[start] + np.uint64(READ_BYTES)  # an int would have NumPy copy all to float64
            after = int(np.searchsorted(self.starts, limit, side="right")) - 1
            after = min(max(after, start + 1), stop)
            begin = int(self.starts[start])
            block = self._read(begin, int(self.starts[after]))
            ends = (self.starts[start : after + 1] - self.starts[start]).tolist()
            for row in range(start, after):
                yield row, block[ends[row - start] : ends[row - start + 1]]
            start = after

    def iter_contents(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The `contents` of the rows from `start` up to `stop`.

        Raises ValueError with the line number at a broken line.
        """
        for row, line in self.lines(start, stop):
            yield self._parse(row, line)["contents"]

    def check_all(self) -> None:
        """Checks each line now, so that `rows` needn't. Raises ValueError that names the first broken one."""
        for _ in self.iter_contents():
            pass
        self._is_checked = True

    def fingerprint(self) -> dict[str, Any]:
        """What tells this corpus from another in a moment: counts, and a SHA-256 of evenly spaced blocks.

        A file of up to 64 MiB is read whole. Of a larger one 512 blocks of 128 KiB are read, the first and
        the last among them: another size or number of lines is always seen, a letter that was changed for
        another only where a block lies. `check_manifest(..., full=True)` sees all.
        """
        return {
            "num_documents": len(self),
            "num_bytes": self.num_bytes,
            "sample_sha256": _sample_sha256(self._file.fileno(), self.num_bytes),
        }

    def sha256(self, progress: Progress | None = None) -> str:
        """SHA-256 of the whole file (1 to 2 GB per second)."""
        digest = hashlib.sha256()
        for begin in range(0, self.num_bytes, READ_BYTES):
            stop = min(begin + READ_BYTES, self.num_bytes)
            digest.update(self._read(begin, stop))
            if progress is not None:
                progress("hashing the corpus (bytes)", stop, self.num_bytes)
        return digest.hexdigest()


def file_identity(path: str | Path) -> dict[str, Any]:
    """What tells a corpus file from another in a moment, on any machine, without finding its lines: its size
    and a hash as in `fingerprint`. Of x.jsonl.gz it is x.jsonl's, which a server unpacks beside it.

    Raises OSError for a file that can't be read.
    """
    path = Path(path)
    with (path.with_suffix("") if path.suffix == ".gz" else path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return {"num_bytes": size, "sample_sha256": _sample_sha256(file.fileno(), size)}


def _sample_sha256(fd: int, num_bytes: int) -> str:
    digest = hashlib.sha256()
    width = FINGERPRINT_BLOCK_BYTES
    if num_bytes <= FINGERPRINT_BLOCKS * width:
        digest.update(_read_file(fd, 0, num_bytes))
    else:
        for begin in np.linspace(0, num_bytes - width, FINGERPRINT_BLOCKS, dtype=np.int64).tolist():
            digest.update(_read_file(fd, begin, begin + width))
    return digest.hexdigest()


def _read_file(fd: int, start: int, stop: int) -> bytes:
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:  # one call reads at most 2 GiB
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise ValueError(f"the corpus file was cut short since it was opened (byte {stop} is gone)")
        data += more
    return data
