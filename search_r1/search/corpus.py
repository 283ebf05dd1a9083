"""A corpus: one JSON object a line, `{"id": "7", "contents": "\\"Title\\"\\ntext", ...}`, read by row number.

    corpus.jsonl(.gz) -> Corpus.open -> rows([5, 2]) -> [Document, Document]     the lines' bytes, by pread
                                     -> iter_contents() -> str, str, ...         for index builders

In memory is only where the rows begin, and that memory-mapped. What a server sends are the bytes of the line,
so a line has to be right before it is sent. `parse_line` says what right means, and each line passes it:
at `open` for a file of up to CHECK_BYTES, else at its first use (one byte of memory and a microsecond each).
A line that is dropped or shifted would make an index answer with the wrong passage; so lines are never
skipped, except blank ones, and a broken one is an error that names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from search_r1.search.corpus_files import BYTE_ORDER_MARK, Progress, RowOffsets, find_rows, unpack_gzip
from search_r1.search.retriever import Document

CHECK_BYTES = 256 * 2**20  # files up to here are checked whole when they are opened, in about a second
READ_BYTES = 8 * 2**20
FINGERPRINT_BLOCKS, FINGERPRINT_BLOCK_BYTES = 512, 128 * 2**10
EXAMPLE = '{"id": "7", "contents": "\\"Title\\"\\ntext"}'


def parse_line(line: bytes) -> dict[str, Any]:
    """The fields of one line. Raises ValueError with the reason when it may not be in a corpus.

    Refused, because a client couldn't read the reply or would read another text than was indexed: what is
    not UTF-8, NaN, Infinity and numbers that overflow a double, half of a surrogate pair ("\\ud83d" alone),
    a byte order mark, an object with two `contents` or two `id`, one without `contents` as a string.
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(_json_problem(line, error)) from None
    if type(fields) is not dict:
        raise ValueError(f"found a JSON {type(fields).__name__}, expected an object: {EXAMPLE}")
    if type(fields.get("contents")) is not str:
        names = ", ".join(map(repr, list(fields)[:8])) or "no fields"
        raise ValueError(f"expected the text as one string under 'contents', found {names}: {EXAMPLE}")
    if line.count(b'"contents"') > 1 or line.count(b'"id"') > 1:
        _refuse_double_fields(line)
    return fields


def _json_problem(line: bytes, error: orjson.JSONDecodeError) -> str:
    """Why orjson refused the line, in words that help to mend it."""
    if line.startswith(BYTE_ORDER_MARK):
        return "begins with a byte order mark inside the file (several files joined?); remove it"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 ({wrong.reason} at byte {wrong.start})"
    if b"NaN" in line or b"Infinity" in line:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)  # Python's own reader lets these pass
            return "not valid JSON (NaN or Infinity stands for a number; write null)"
    if "surrogate" in error.msg:
        return f"half of a surrogate pair, which is no character ({error.msg} at column {error.colno})"
    return f"not valid JSON ({error.msg} at column {error.colno})"


def _refuse_double_fields(line: bytes) -> None:
    """Raises ValueError when the object itself, not one inside it, has `contents` or `id` twice."""
    top: list[str] = []

    def keep_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        top[:] = [name for name, _ in pairs]  # the outermost object comes last
        return dict(pairs)

    json.loads(line, object_pairs_hook=keep_names)
    for name in ("contents", "id"):
        if top.count(name) > 1:
            raise ValueError(f"has the field '{name}' twice; readers disagree about which one counts")


class Corpus:
    """Random access to the lines of a corpus. Any number of threads may use it at once.

    Example: Corpus.open("wiki-18.jsonl").rows([0])[0].contents
    """

    def __init__(self, rows: RowOffsets, read: Callable[[int, int], bytes], path: Path | None) -> None:
        """Use `open` or `from_documents`. `read(start, stop)` gives the bytes from start to stop."""
        self.path = path
        self.num_bytes = int(rows.starts[-1])
        self.starts = rows.starts
        self.num_blank_lines = rows.num_blank_lines
        self._read = read
        self._fd = -1
        self._checked: np.ndarray | None = np.zeros(len(self), dtype=bool)  # None: all of them are

    @classmethod
    def open(cls, path: str | Path, progress: Progress | None = None) -> Corpus:
        """Opens a .jsonl file, or a .jsonl.gz file, which is unpacked once beside itself.

        The first time it is read once to find the lines (about a second per GB); this is kept in
        `<path>.offsets.npy`. Raises ValueError with the line number for a broken line (see the top of this
        file for when), for a file that can't be read and for one without documents.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"--corpus_path: there is no file {path}")
        try:
            if path.suffix == ".gz":
                path = unpack_gzip(path, progress)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"--corpus_path: can't read {path} ({error.strerror})") from None
        try:
            corpus = cls(find_rows(path, progress), lambda start, stop: _read_file(fd, start, stop), path)
            corpus._fd = fd
            if corpus.num_bytes <= CHECK_BYTES:
                corpus.check_all()
        except BaseException:
            os.close(fd)
            raise
        return corpus

    @classmethod
    def from_documents(cls, documents: Sequence[dict[str, Any]]) -> Corpus:
        """A corpus in memory. Raises ValueError for documents that `parse_line` refuses, and for none."""
        if not documents:
            raise ValueError("the corpus has no documents")
        lines = [Document.from_fields(fields).json + b"\n" for fields in documents]
        text = b"".join(lines)
        starts = np.cumsum([0, *map(len, lines)], dtype=np.uint64)
        corpus = cls(RowOffsets(starts, 0), lambda start, stop: text[start:stop], None)
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
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        self._read = _closed

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
            raw = self._read(start_of(row), start_of(row + 1))
            documents.append(Document(self._line(row, raw), row))
        return documents

    def _line(self, row: int, raw: bytes) -> bytes:
        """The JSON text of a row from its bytes; checked if it never was."""
        line = raw.strip(b" \t\r\n")
        if self._checked is not None and not self._checked[row]:
            self._parse(row, line)
            self._checked[row] = True
        if not line.startswith(b"{") or not line.endswith(b"}") or b"\n" in line:
            raise ValueError(f"{self.where(row)}: no JSON object any more; the file was changed while in use")
        return line

    def _parse(self, row: int, line: bytes) -> dict[str, Any]:
        try:
            return parse_line(line)
        except ValueError as error:
            raise ValueError(f"{self.where(row)}: {error}") from None

    def where(self, row: int) -> str:
        """File and line of a row, for messages: "corpus.jsonl, line 7"."""
        if self.path is None:
            return f"document {row}"
        start = int(self.starts[row])
        if self.num_blank_lines == 0:
            return f"{self.path}, line {row + 1}"
        if start <= CHECK_BYTES:
            return f"{self.path}, line {self._read(0, start).count(10) + 1}"
        return f"{self.path}, document {row + 1} (at byte {start})"

    def _blocks(self, first: int, stop: int) -> Iterator[tuple[int, bytes, list[int]]]:
        """(first row, bytes of some rows, where each begins in them and the last ends) from row to row."""
        while first < stop:
            begin = int(self.starts[first])
            limit = np.uint64(begin + READ_BYTES)  # an int would have NumPy copy all starts to float64
            after = int(np.searchsorted(self.starts, limit, side="right")) - 1
            after = min(max(after, first + 1), stop)
            bounds = (self.starts[first : after + 1] - self.starts[first]).tolist()
            yield first, self._read(begin, int(self.starts[after])), bounds
            first = after

    def iter_contents(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The `contents` of the rows from `start` up to `stop`, read in large blocks.

        Raises ValueError with the line number at a broken line.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        for first, block, bounds in self._blocks(start, stop):
            for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
                yield self._parse(first + number, block[begin:end])["contents"]

    def check_all(self) -> None:
        """Checks each line now, so that `rows` needn't. Raises ValueError that names the first broken one."""
        for _ in self.iter_contents():
            pass
        self._checked = None

    def fingerprint(self) -> dict[str, Any]:
        """What tells this corpus from another in a moment: counts, and a SHA-256 of evenly spaced blocks.

        A file of up to 64 MiB is read whole. Of a larger one 512 blocks of 128 KiB are read, the first and
        the last among them: another size or number of lines is always seen, a letter that was changed for
        another only where a block lies. `check_manifest(..., full=True)` sees all.
        """
        return {
            "num_documents": len(self),
            "num_bytes": self.num_bytes,
            "sample_sha256": _sample_sha256(self._read, self.num_bytes),
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
    path = path.with_suffix("") if path.suffix == ".gz" else path
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        sample = _sample_sha256(lambda start, stop: _read_file(fd, start, stop), size)
    finally:
        os.close(fd)
    return {"num_bytes": size, "sample_sha256": sample}


def _sample_sha256(read: Callable[[int, int], bytes], num_bytes: int) -> str:
    digest = hashlib.sha256()
    width = FINGERPRINT_BLOCK_BYTES
    if num_bytes <= FINGERPRINT_BLOCKS * width:
        digest.update(read(0, num_bytes))
    else:
        for begin in np.linspace(0, num_bytes - width, FINGERPRINT_BLOCKS, dtype=np.int64).tolist():
            digest.update(read(begin, begin + width))
    return digest.hexdigest()


def _read_file(fd: int, start: int, stop: int) -> bytes:
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:  # one call reads at most 2 GiB
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise ValueError(f"the corpus file was cut short since it was opened (byte {stop} is gone)")
        data += more
    return data


def _closed(start: int, stop: int) -> bytes:
    raise ValueError("the corpus is closed")
