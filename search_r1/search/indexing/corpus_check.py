"""Check a whole corpus before hours are spent on an index of it: broken lines, double ids, its hash.

It takes 8 bytes of memory per row for a hash of its id, and some 30 at the end, when these are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from search_r1.search.corpus import Corpus, parse_line
from search_r1.search.long_work import Progress

NO_ID = bytes(8)
MAX_NAMED = 10


@dataclass
class Faults:
    """The faults of one kind: how many there are, and the first of them as lines for people."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, corpus: Corpus, row: int, problem: object) -> None:
        self.count += 1
        if self.count <= MAX_NAMED:
            self.named.append(f"line {corpus.line_number(row)}: {problem}")

    def __str__(self) -> str:
        more = [f"... and {self.count - len(self.named):,} more"] if self.count > len(self.named) else []
        return "".join(f"\n  {line}" for line in [*self.named, *more])


@dataclass
class CorpusReport:
    """The result of `check_corpus`.

    Attributes:
        path: The file, unpacked.
        num_documents: The number of rows.
        num_bytes: The size of the file.
        mtime_ns: The time of the file before it was read.
        sha256: The hash of the whole file.
        broken_lines: Lines that can't be read: "line 7: not valid JSON (...)".
        duplicate_ids: Rows whose id an earlier row has: "line 9: the id '7' is at line 3 already".
        empty_documents: Rows whose contents have no text.
    """

    path: Path
    num_documents: int
    num_bytes: int
    mtime_ns: int
    sha256: str = ""
    broken_lines: Faults = field(default_factory=Faults)
    duplicate_ids: Faults = field(default_factory=Faults)
    empty_documents: Faults = field(default_factory=Faults)

    def is_outdated(self) -> bool:
        """Return whether the file has another size or time by now."""
        stat = self.path.stat()
        return (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.mtime_ns)


def check_corpus(path: str | Path, progress: Progress | None = None) -> CorpusReport:
    """Read the whole file and report on it.

    Raises ValueError only for a file that can't be read at all, or that changes meanwhile.
    """
    with Corpus.open(path, progress, check=False) as corpus:
        report = CorpusReport(corpus.path, len(corpus), corpus.num_bytes, corpus.path.stat().st_mtime_ns)
        ids = bytearray()
        for row, line in corpus.lines():
            identifier = None
            try:
                fields = parse_line(line)
                identifier = fields.get("id")
                if not fields["contents"].strip():
                    report.empty_documents.add(corpus, row, "the contents are empty")
            except ValueError as error:
                report.broken_lines.add(corpus, row, error)
            ids += NO_ID if identifier is None else blake2b(str(identifier).encode(), digest_size=8).digest()
            if progress is not None and row % 1000 == 999:
                progress("checking the corpus", row + 1, len(corpus))
        # "7" and 7 are one id. The odds that two of 21 million ids share a hash are 1 in 80,000.
        hashes = np.frombuffer(ids, np.uint64)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        repeats = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)) + 1
        report.duplicate_ids.count = len(repeats)
        for position in repeats[np.argsort(order[repeats])][:MAX_NAMED]:
            row = int(order[position])
            first = int(order[np.searchsorted(ordered, ordered[position])])
            identifier = parse_line(next(corpus.lines(row))[1])["id"]
            report.duplicate_ids.named.append(
                f"line {corpus.line_number(row)}: the id {str(identifier)!r} is at line "
                f"{corpus.line_number(first)} already"
            )
        report.sha256 = corpus.sha256(progress)
    if report.is_outdated():
        raise ValueError(f"{report.path} was changed while it was checked; start again when it is finished")
    return report
