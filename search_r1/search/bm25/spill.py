"""First step of a build: texts to parts, sorted runs of postings on disk.

    rows [start, stop) of the corpus -> words -> numbers of terms -> sorted postings -> parts/000012-000/, ...
                                                                                        parts/000012.json,
                                                                                        last

A part holds some documents' postings, sorted by term and row, and their terms, sorted. How the corpus is
cut into parts leaves no trace in the finished index. A task is done when its .json is there.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from search_r1.search.bm25.analysis import normalize, words
from search_r1.search.bm25.index import encode_lengths
from search_r1.search.corpus import Corpus

NORMALIZED_WORDS = 1 << 18  # kept by a worker from part to part, about 50 MB
BYTES_PER_TOKEN = 400  # of memory that a worker needs, at worst: each token another term
MAX_FREQUENCY = 255  # in `frequencies`; higher ones are in `high_at` and `high_frequencies`


class PartBuffer:
    """Collects documents until they are worth a part."""

    def __init__(self, first_row: int) -> None:
        self.first_row = first_row
        self.ids = array("I")
        self.ends = array("q")
        self._numbers = _WordNumbers()

    def add(self, text: str) -> None:
        """Adds the next document."""
        self.ids.extend(map(self._numbers.__getitem__, words(text)))
        self.ends.append(len(self.ids))

    def write(self, folder: Path) -> None:
        """Writes the part into `folder`."""
        ids = np.asarray(self.ids, dtype=np.uint32)
        ends = np.asarray(self.ends, dtype=np.int64)
        unsorted = list(self._numbers.of_term)
        order = sorted(range(len(unsorted)), key=unsorted.__getitem__)  # as UTF-8 orders
        terms = [unsorted[number] for number in order]
        rank_of_id = np.zeros(len(terms) + 1, dtype=np.uint64)
        rank_of_id[np.array(order, dtype=np.int64) + 1] = np.arange(len(terms), dtype=np.uint64)

        places = np.repeat(np.arange(len(ends), dtype=np.uint64), np.diff(ends, prepend=0))
        kept = ids != 0
        keys = rank_of_id[ids[kept]] << np.uint64(32) | places[kept]
        lengths = np.bincount(places[kept].astype(np.int64), minlength=len(ends))
        keys.sort()
        first = (
            np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, int)
        )
        frequencies = np.diff(first, append=len(keys))
        keys = keys[first]
        rows = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        counts = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(terms))
        self._save(folder, terms, counts, rows, frequencies, lengths)

    def _save(
        self,
        folder: Path,
        terms: list[str],
        counts: np.ndarray,
        rows: np.ndarray,
        frequencies: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        folder.mkdir(parents=True)
        encoded = [term.encode() for term in terms]
        (folder / "terms.bin").write_bytes(b"".join(encoded))
        np.fromiter(map(len, encoded), np.uint16, len(encoded)).tofile(folder / "term_lengths")
        counts.astype(np.uint32).tofile(folder / "counts")
        (rows + np.uint32(self.first_row)).tofile(folder / "documents")
        np.minimum(frequencies, MAX_FREQUENCY).astype(np.uint8).tofile(folder / "frequencies")
        high = np.flatnonzero(frequencies >= MAX_FREQUENCY)
        high.astype(np.int64).tofile(folder / "high_at")
        frequencies[high].astype(np.uint32).tofile(folder / "high_frequencies")
        lengths.astype(np.int64).tofile(folder / "lengths")
        # How often each (frequency, norm) comes up; only frequencies that fit a byte may get a code.
        low = frequencies < MAX_FREQUENCY
        pairs = frequencies[low] << 8 | encode_lengths(lengths)[rows[low]]
        np.bincount(pairs, minlength=1 << 16).tofile(folder / "pair_counts")


class _WordNumbers(dict):
    """Numbers of words as written: 0 for one that is not indexed, else its term's number, from 1 on."""

    def __init__(self) -> None:
        self.of_term: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = _normalize(word)
        number = 0 if term is None else self.of_term.setdefault(term, len(self.of_term) + 1)
        self[word] = number
        return number


_normalize = lru_cache(NORMALIZED_WORDS)(normalize)


def spill(texts: Iterable[str], first_row: int, folder: Path, task: int, max_tokens: int) -> list[str]:
    """Writes the parts of one task and its .json; returns the parts' names.

    A part ends with the document that brings it to `max_tokens` words.
    """
    for left_over in folder.glob(f"{task:06d}-*"):  # of a run that was killed
        shutil.rmtree(left_over)
    names: list[str] = []
    row = first_row
    buffer = PartBuffer(row)
    for text in texts:
        buffer.add(text)
        row += 1
        if len(buffer.ids) >= max_tokens:
            names.append(f"{task:06d}-{len(names):03d}")
            buffer.write(folder / names[-1])
            buffer = PartBuffer(row)
    if buffer.ends:
        names.append(f"{task:06d}-{len(names):03d}")
        buffer.write(folder / names[-1])
    done = folder / f"{task:06d}.partial"
    done.write_text(json.dumps(names), encoding="utf-8")
    done.rename(folder / f"{task:06d}.json")
    return names


_open_corpus = lru_cache(1)(Corpus.open)  # in a worker process


def spill_rows(path: Path, start: int, stop: int, folder: Path, task: int, max_tokens: int) -> list[str]:
    """`spill` in a worker process: the rows from start to stop of the corpus at `path`."""
    return spill(_open_corpus(path).iter_contents(start, stop), start, folder, task, max_tokens)
