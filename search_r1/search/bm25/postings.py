"""Third step of a build: the postings of all parts, term by term, become the postings of the index.

    parts (sorted by term and row) -> chunks of terms -> documents.npy, codes.npy
                                                      -> chunks/*.npz: maxima, skips, rare postings

A chunk is a range of terms whose postings fit in memory. Each part holds them in one piece; they are copied
to their places, part after part, so that rows ascend. A chunk is done when its .npz is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from search_r1.search.bm25.index import MIN_SKIPPED, RARE_CODE, SKIP_BITS, SKIP_WIDTH, jit

BYTES_PER_POSTING = 16  # of memory while a chunk is made


@dataclass
class Merge:
    """What the chunks are made from. `firsts` [P + 1]: where a part's terms begin in `numbers` and
    `counts`."""

    parts: list[Path]
    firsts: np.ndarray
    numbers: np.ndarray  # uint32, the index's number of each part's each term
    counts: np.ndarray  # uint32, its postings in the part
    posting_starts: np.ndarray  # int64 [terms + 1]
    norms: np.ndarray  # uint8 [documents]
    inverse_norms: np.ndarray  # float32 [256]
    code_of_pair: np.ndarray  # uint8 [65536], by frequency << 8 | norm


def cut_terms(posting_starts: np.ndarray, max_postings: int) -> list[tuple[int, int]]:
    """Ranges of terms with at most `max_postings` postings each, or of one term."""
    bounds = [0]
    while bounds[-1] < len(posting_starts) - 1:
        limit = posting_starts[bounds[-1]] + max_postings
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(posting_starts, limit, side="right")) - 1))
    return list(zip(bounds, bounds[1:], strict=False))


def write_postings(
    merge: Merge, folder: Path, work: Path, max_postings: int, progress: Callable[[int, int], None]
) -> list[Path]:
    """Writes documents.npy and codes.npy into `folder`; returns the chunks' files, in order of terms."""
    total = int(merge.posting_starts[-1])
    _make_array(folder / "documents.npy", np.uint32, total)
    _make_array(folder / "codes.npy", np.uint8, total)
    chunks = []
    begins = merge.firsts[:-1].copy()
    postings = np.zeros(len(merge.parts), dtype=np.int64)
    for first, stop in cut_terms(merge.posting_starts, max_postings):
        spans = zip(begins, merge.firsts[1:], strict=True)
        ends = np.array([begin + np.searchsorted(merge.numbers[begin:end], stop) for begin, end in spans])
        spans = zip(begins, ends, strict=True)
        sizes = np.array([merge.counts[begin:end].sum(dtype=np.int64) for begin, end in spans])
        chunk = work / f"{first:010d}-{stop:010d}.npz"
        if not chunk.exists():
            slices = Slices(begins, ends, postings, sizes)
            documents, frequencies = _gather(merge, first, stop, slices)
            _write_chunk(merge, first, stop, documents, frequencies, folder, chunk)
        begins, postings = ends, postings + sizes
        chunks.append(chunk)
        progress(int(merge.posting_starts[stop]), total)
    return chunks


def _make_array(path: Path, dtype: type, length: int) -> None:
    """A file to write into, if there is none from an earlier run."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=(length,))
        partial.rename(path)


def _write_into(path: Path, start: int, values: np.ndarray) -> None:
    """Writes `values` at place `start` of the array in a file."""
    header = np.load(path, mmap_mode="r").offset
    with path.open("r+b") as file:
        file.seek(header + start * values.itemsize)
        values.tofile(file)


@dataclass
class Slices:
    """What each part has of a chunk: its terms from begins to ends, `sizes` postings from `postings` on."""

    begins: np.ndarray
    ends: np.ndarray
    postings: np.ndarray
    sizes: np.ndarray


def _gather(merge: Merge, first: int, stop: int, slices: Slices) -> tuple[np.ndarray, np.ndarray]:
    """Rows and frequencies (uint32) of the terms from first to stop, sorted by term and row."""
    starts = merge.posting_starts[first : stop + 1] - merge.posting_starts[first]
    documents = np.empty(starts[-1], dtype=np.uint32)
    frequencies = np.empty(starts[-1], dtype=np.uint32)
    free = starts[:-1].copy()
    for number, part in enumerate(merge.parts):
        terms = slice(slices.begins[number], slices.ends[number])
        rows, part_frequencies = _read_postings(part, int(slices.postings[number]), int(slices.sizes[number]))
        scatter(
            merge.numbers[terms],
            merge.counts[terms],
            first,
            rows,
            part_frequencies,
            free,
            documents,
            frequencies,
        )
    return documents, frequencies


def _write_chunk(
    merge: Merge,
    first: int,
    stop: int,
    documents: np.ndarray,
    frequencies: np.ndarray,
    folder: Path,
    target: Path,
) -> None:
    """Writes the postings of the terms from first to stop, and what is known of them into `target`."""
    offset = int(merge.posting_starts[first])
    starts = merge.posting_starts[first : stop + 1] - offset
    codes = np.empty(starts[-1], dtype=np.uint8)
    highest = np.empty(stop - first, dtype=np.float32)
    encode(
        starts, documents, frequencies, merge.norms, merge.inverse_norms, merge.code_of_pair, codes, highest
    )
    _write_into(folder / "documents.npy", offset, documents)
    _write_into(folder / "codes.npy", offset, codes)
    rare = np.flatnonzero(codes == RARE_CODE)
    skip_terms = np.flatnonzero(np.diff(starts) * SKIP_WIDTH >= MIN_SKIPPED * len(merge.norms))
    num_blocks = -(-len(merge.norms) // SKIP_WIDTH)
    block_starts = np.arange(num_blocks + 1, dtype=np.int64) << SKIP_BITS
    skips = [np.searchsorted(documents[starts[term] : starts[term + 1]], block_starts) for term in skip_terms]
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            highest=highest,
            rare_at=rare + offset,
            rare_frequency=frequencies[rare],
            skip_terms=skip_terms + first,
            skips=np.array(skips, dtype=np.uint32).reshape(len(skip_terms), num_blocks + 1),
        )
    partial.rename(target)


def _read_postings(part: Path, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and frequencies (uint32) of some postings of a part."""
    rows = np.fromfile(part / "documents", np.uint32, count, offset=4 * start)
    frequencies = np.fromfile(part / "frequencies", np.uint8, count, offset=start).astype(np.uint32)
    high_at = np.fromfile(part / "high_at", np.int64)
    begin, end = np.searchsorted(high_at, [start, start + count])
    high = np.fromfile(part / "high_frequencies", np.uint32)
    frequencies[high_at[begin:end] - start] = high[begin:end]
    return rows, frequencies


def join_chunks(chunks: list[Path], name: str) -> np.ndarray:
    """One of the arrays of all chunks."""

    def arrays() -> Iterator[np.ndarray]:
        for chunk in chunks:
            with np.load(chunk) as loaded:
                yield loaded[name]

    return np.concatenate(list(arrays()))


@jit
def scatter(numbers, counts, first, rows, part_frequencies, free, documents, frequencies):
    """Copies a part's postings of some terms to their places; `free` [terms]: the next place of each."""
    source = 0
    for place in range(len(numbers)):
        term = np.int64(numbers[place]) - first
        target = free[term]
        for _ in range(counts[place]):
            documents[target] = rows[source]
            frequencies[target] = part_frequencies[source]
            source += 1
            target += 1
        free[term] = target


@jit
def encode(starts, documents, frequencies, norms, inverse_norms, code_of_pair, codes, highest):
    """The code of each posting, and each term's highest frequency * inverse_norm."""
    for term in range(len(starts) - 1):
        best = np.float32(0)
        for place in range(starts[term], starts[term + 1]):
            frequency, norm = frequencies[place], norms[documents[place]]
            best = max(best, np.float32(frequency) * inverse_norms[norm])
            codes[place] = code_of_pair[frequency << 8 | norm] if frequency < 256 else RARE_CODE
        highest[term] = best
