"""Second step of a build: the terms of all parts, each sorted, become one sorted list.

    terms of part 0, part 1, ... -> merge_terms -> terms.bin, term_starts, counts
                                                -> numbers: for each part the new number of each of its terms

A merge over a heap, one term of each part in memory: the parts' terms are read from mapped files, front to
back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from search_r1.search.bm25.index import jit

BATCH_TERMS, BATCH_BYTES = 1 << 18, 1 << 22  # merged before they are written


def merge_terms(parts: list[Path], folder: Path) -> tuple[int, np.ndarray]:
    """Writes terms.bin and term_starts.npy into `folder`, and `numbers` (uint32) beside the parts' own files.

    Returns how many terms there are and where each part's terms begin in `numbers` [P + 1].
    """
    work = parts[0].parent
    for name in ("terms.bin", "term_lengths", "counts"):
        _join([part / name for part in parts], work / name)
    text, lengths, counts = (
        map_array(work / name, dtype)
        for name, dtype in (("terms.bin", np.uint8), ("term_lengths", np.uint16), ("counts", np.uint32))
    )
    firsts = _starts([(part / "term_lengths").stat().st_size // 2 for part in parts])
    byte_firsts = _starts([(part / "terms.bin").stat().st_size for part in parts])
    numbers = np.memmap(work / "numbers", dtype=np.uint32, mode="w+", shape=(int(firsts[-1]),))

    next_terms, next_bytes = firsts[:-1].copy(), byte_firsts[:-1].copy()
    heap = np.flatnonzero(np.diff(firsts) > 0)
    heads = np.zeros(len(parts), dtype=np.uint64)
    size = start_merge(text, lengths, next_terms, next_bytes, heads, heap)
    out_text = np.empty(BATCH_BYTES, dtype=np.uint8)
    out_lengths, out_counts = np.empty(BATCH_TERMS, np.int64), np.empty(BATCH_TERMS, np.int64)
    num_terms = 0
    with (
        (folder / "terms.bin").open("wb") as terms_file,
        (work / "all_lengths").open("wb") as lengths_file,
        (work / "all_counts").open("wb") as counts_file,
    ):
        while size:
            size, written, num_bytes = merge_batch(
                text, lengths, counts, next_terms, next_bytes, firsts, heads, heap, size,
                numbers, num_terms, out_text, out_lengths, out_counts,
            )  # fmt: skip
            out_text[:num_bytes].tofile(terms_file)
            out_lengths[:written].tofile(lengths_file)
            out_counts[:written].tofile(counts_file)
            num_terms += written
    numbers.flush()
    for name in ("terms.bin", "term_lengths"):
        (work / name).unlink()
    return num_terms, firsts


def _join(paths: list[Path], target: Path) -> None:
    with target.open("wb") as joined:
        for path in paths:
            joined.write(path.read_bytes())


def map_array(path: Path, dtype: type) -> np.ndarray:
    """The numbers in a file, read-only and read when they are needed."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _starts(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@jit
def _head(text, start, length):
    """The first eight bytes as a number that orders as they do."""
    value = np.uint64(0)
    for place in range(8):
        value <<= np.uint64(8)
        if place < length:
            value |= np.uint64(text[start + place])
    return value


@jit
def _less(one, other, text, lengths, next_terms, next_bytes, heads):
    """Whether part `one`'s next term comes before part `other`'s; equal terms in the order of the parts."""
    if heads[one] != heads[other]:
        return heads[one] < heads[other]
    length, other_length = lengths[next_terms[one]], lengths[next_terms[other]]
    start, other_start = next_bytes[one], next_bytes[other]
    for place in range(8, min(length, other_length)):
        if text[start + place] != text[other_start + place]:
            return text[start + place] < text[other_start + place]
    return length < other_length or (length == other_length and one < other)


@jit
def _sift(heap, size, place, text, lengths, next_terms, next_bytes, heads):
    """Moves the entry at `place` down to where it belongs."""
    part = heap[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _less(
            heap[child + 1], heap[child], text, lengths, next_terms, next_bytes, heads
        ):
            child += 1
        if not _less(heap[child], part, text, lengths, next_terms, next_bytes, heads):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = part


@jit
def start_merge(text, lengths, next_terms, next_bytes, heads, heap):
    """Makes a heap of the parts in `heap` (those with terms); returns its size."""
    for part in heap:
        heads[part] = _head(text, next_bytes[part], lengths[next_terms[part]])
    for place in range(len(heap) // 2, -1, -1):
        if place < len(heap):
            _sift(heap, len(heap), place, text, lengths, next_terms, next_bytes, heads)
    return len(heap)


@jit
def merge_batch(
    text, lengths, counts, next_terms, next_bytes, firsts, heads, heap, size,
    numbers, num_terms, out_text, out_lengths, out_counts,
):  # fmt: skip
    """Merges until the output is full or the heap empty; returns (heap size, terms and bytes written)."""
    written, num_bytes = 0, np.int64(0)
    last_start, last_length = np.int64(0), np.int64(-1)
    while size > 0:
        part = heap[0]
        start, length = next_bytes[part], np.int64(lengths[next_terms[part]])
        same = length == last_length
        place = 0
        while same and place < length:
            same = text[start + place] == text[last_start + place]
            place += 1
        if not same:
            if written == len(out_lengths) or num_bytes + length > len(out_text):
                break
            for place in range(length):
                out_text[num_bytes + place] = text[start + place]
            num_bytes += length
            out_lengths[written] = length
            out_counts[written] = 0
            written += 1
            last_start, last_length = start, length
        numbers[next_terms[part]] = num_terms + written - 1
        out_counts[written - 1] += counts[next_terms[part]]
        next_terms[part] += 1
        next_bytes[part] += length
        if next_terms[part] == firsts[part + 1]:
            size -= 1
            heap[0] = heap[size]
        else:
            heads[part] = _head(text, next_bytes[part], lengths[next_terms[part]])
        if size > 0:
            _sift(heap, size, 0, text, lengths, next_terms, next_bytes, heads)
    return size, written, num_bytes
