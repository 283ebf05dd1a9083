"""Checks a whole corpus before hours are spent on an index of it: broken lines, double ids, its hash.

    corpus.jsonl -> blocks of whole rows -> parse_line on each row -> CorpusReport

Memory: 8 bytes per row for the offsets and 8 for a hash of its id; some 30 bytes per row at the end, when
these are sorted (0.7 GB for 21 million rows).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from search_r1.search.corpus import parse_line
from search_r1.search.corpus_files import BYTE_ORDER_MARK, Progress, find_rows, unpack_gzip

BLOCK_BYTES = 16 * 2**20
NO_ID = bytes(8)


@dataclass
class CorpusReport:
    """What `check_corpus` found.

    `sha256`: of the whole file. `problems`: the first broken lines, "line 7: not valid JSON (...)".
    `duplicates`: the first rows whose id an earlier row has, "line 9: the id '7' is at line 3 already".
    `empty`: the first lines whose contents have no text. The numbers beside the lists count all of them.
    """

    path: Path
    num_documents: int
    num_bytes: int
    mtime_ns: int  # of the file, before it was read
    sha256: str = ""
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    duplicates: list[str] = field(default_factory=list)
    num_duplicates: int = 0
    empty: list[str] = field(default_factory=list)
    num_empty: int = 0


def check_corpus(path: str | Path, max_problems: int = 10, progress: Progress | None = None) -> CorpusReport:
    """Reads the whole file and reports; only a file that can't be read at all raises ValueError.

    Args:
        path: .jsonl, or .jsonl.gz, which is unpacked beside itself.
        max_problems: how many of each kind are named; all are counted.
        progress: called with the rows done and the rows there are.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--corpus_path: there is no file {path}")
    path = unpack_gzip(path, progress) if path.suffix == ".gz" else path
    mtime_ns = path.stat().st_mtime_ns
    starts = find_rows(path, progress).starts
    report = CorpusReport(path, len(starts) - 1, int(starts[-1]), mtime_ns)
    digest = hashlib.sha256()
    ids = bytearray()
    blocks: list[tuple[int, int, int]] = []  # first row, first line, beginning in the file
    line = 0
    for begin, end in _blocks(starts):
        blocks.append((len(ids) // 8, line, begin))
        data = _read(path, begin, end)
        digest.update(data)
        rows = data.removeprefix(BYTE_ORDER_MARK) if begin == 0 else data
        for number, text in enumerate(rows.split(b"\n"), start=line + 1):
            if text.strip(b" \t\r"):
                ids += _check_line(text, number, report, max_problems)
        line += data.count(b"\n")
        if progress is not None:
            progress("checking the corpus", len(ids) // 8, report.num_documents)
    if len(ids) // 8 != report.num_documents or is_changed(path, report.num_bytes, mtime_ns):
        raise ValueError(f"{path} was changed while it was checked; start again when it is finished")
    report.sha256 = digest.hexdigest()
    _find_duplicates(np.frombuffer(ids, np.uint64), starts, blocks, report, max_problems)
    return report


def _check_line(text: bytes, number: int, report: CorpusReport, max_problems: int) -> bytes:
    """Adds what is wrong with line `number` to the report; returns 8 bytes of its id, or NO_ID."""
    try:
        fields = parse_line(text)
    except ValueError as error:
        report.num_problems += 1
        if report.num_problems <= max_problems:
            report.problems.append(f"line {number}: {error}")
        return NO_ID
    if not fields["contents"].strip():
        report.num_empty += 1
        if report.num_empty <= max_problems:
            report.empty.append(f"line {number}: the contents are empty")
    identifier = fields.get("id")
    return NO_ID if identifier is None else _hash(identifier)


def _hash(identifier: object) -> bytes:
    """8 bytes of an id; "7" and 7 are one id. That two of 21 million share them has odds of 1 in 80,000."""
    return hashlib.blake2b(str(identifier).encode(), digest_size=8).digest()


def is_changed(path: Path, num_bytes: int, mtime_ns: int) -> bool:
    """Whether the file is no longer of this size and time."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) != (num_bytes, mtime_ns)


def _blocks(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where blocks of whole rows begin and end in the file; together they are the file."""
    num_rows = len(starts) - 1
    begin = row = 0
    while row < num_rows:
        limit = np.uint64(int(starts[row]) + BLOCK_BYTES)  # an int would have NumPy copy all to float64
        after = int(np.searchsorted(starts, limit, side="right")) - 1
        row = min(max(after, row + 1), num_rows)
        yield begin, int(starts[row])
        begin = int(starts[row])


def _read(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _find_duplicates(
    hashes: np.ndarray,
    starts: np.ndarray,
    blocks: list[tuple[int, int, int]],
    report: CorpusReport,
    max_problems: int,
) -> None:
    """Counts the rows whose id an earlier row has, and names the first of them in the report."""

    def identifier(row: int) -> str:
        return str(parse_line(_read(report.path, int(starts[row]), int(starts[row + 1])))["id"])

    def line_number(row: int) -> int:
        _, line, begin = blocks[bisect.bisect_right(blocks, row, key=lambda block: block[0]) - 1]
        return line + _read(report.path, begin, int(starts[row])).count(b"\n") + 1

    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    later = order[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)]
    rows = np.sort(later)[:max_problems]
    report.num_duplicates = len(later)
    for row, first in zip(rows.tolist(), order[np.searchsorted(ordered, hashes[rows])].tolist(), strict=True):
        if identifier(row) != identifier(first):  # only their hashes are equal
            report.num_duplicates -= 1
            continue
        report.duplicates.append(
            f"line {line_number(row)}: the id {identifier(row)!r} is at line {line_number(first)} already"
        )
