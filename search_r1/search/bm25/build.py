"""Build a BM25 index: `build_index(corpus, folder, progress)`.

    corpus -> parts: runs of documents, each with its terms and postings sorted   several processes, on disk
           -> all terms, sorted; each part's terms get their numbers there        in memory, 150 bytes a term
           -> postings of all parts, range of terms by range of terms -> the files of Index

The finished files have the same bytes for any memory limit and any number of processes. A build that was
killed continues when it is called again. The parts of a task are done when its .json file is there. All else
is made again.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.search.bm25.analysis import normalize, words
from search_r1.search.bm25.index import (
    BLOCK_BITS,
    BLOCK_WIDTH,
    BLOCKED_SHARE,
    HEADER_NAME,
    MIN_SKIPPED,
    RARE_CODE,
    SHARE_STEPS,
    SKIP_WIDTH,
    IndexHeader,
    encode_lengths,
    inverse_norms,
    read_header,
)
from search_r1.search.corpus import Corpus
from search_r1.search.long_work import Progress, end_with_parent

TASK_BYTES = 32 * 2**20  # bytes of the corpus in a task; a killed build does unfinished tasks again
MAX_TOKENS = 1 << 23  # the most tokens of a part
BYTES_PER_TOKEN = 400  # memory that a process needs at worst, when each token is another term
BYTES_PER_POSTING = 32  # memory that it takes to write a range of terms
NORMALIZED_WORDS = 1 << 18  # words that a process remembers from part to part, about 50 MB
SHARE_MARGIN = 1e-3  # of a step; more than a float32 score is wrong
MAX_FREQUENCY = 255  # a posting of this frequency or more has no code of its own

_normalize = lru_cache(NORMALIZED_WORDS)(normalize)
_open_corpus = lru_cache(1)(Corpus.open)  # for worker processes


def build_index(
    corpus: Corpus,
    folder: Path,
    progress: Progress,
    memory_limit_bytes: int = 4 * 2**30,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Write the index of `corpus` into `folder`, going on from what an earlier call left there.

    Args:
        corpus: The documents.
        folder: A folder that exists.
        progress: Is told how far the build is.
        memory_limit_bytes: The memory of all processes together, not counting the terms.
        num_processes: How many processes cut the texts into words.

    Returns:
        The parameters of the index for its manifest.

    Raises:
        ValueError: For a broken line of the corpus, and for a corpus without words.
    """
    work = folder / "work"
    if not (folder / HEADER_NAME).exists():  # if it exists, a build was killed while it removed `work`
        parts = _make_parts(corpus, work / "sorted", memory_limit_bytes, num_processes, progress)
        header = _write_index(parts, folder, memory_limit_bytes // 2 // BYTES_PER_POSTING, progress)
        partial = work / HEADER_NAME
        partial.write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / HEADER_NAME)
    shutil.rmtree(work, ignore_errors=True)
    return asdict(read_header(folder))


def _make_parts(
    corpus: Corpus, folder: Path, memory_limit_bytes: int, num_processes: int, progress: Progress
) -> list[Path]:
    """Return the parts of the whole corpus, in order of rows. Make those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = max(1, len(corpus) * TASK_BYTES // corpus.num_bytes)
    starts = enumerate(range(0, len(corpus), rows))
    tasks = {folder / f"{number:06d}": (start, min(start + rows, len(corpus))) for number, start in starts}
    waiting = {task: span for task, span in tasks.items() if not task.with_suffix(".json").exists()}
    num_processes = min(num_processes, len(tasks))
    max_tokens = min(MAX_TOKENS, memory_limit_bytes // num_processes // BYTES_PER_TOKEN)
    finished: Iterator[int]
    if num_processes == 1 or len(waiting) < 2:
        finished = (_make_task(corpus, task, *span, max_tokens) for task, span in waiting.items())
    else:
        finished = _make_in_processes(corpus.path, waiting, max_tokens, num_processes)
    num_done = len(corpus) - sum(stop - start for start, stop in waiting.values())
    progress("reading the corpus", num_done, len(corpus))
    for num_rows in finished:
        num_done += num_rows
        progress("reading the corpus", num_done, len(corpus))
    return [folder / name for task in tasks for name in json.loads(task.with_suffix(".json").read_text())]


def _make_in_processes(
    path: Path, waiting: dict[Path, tuple[int, int]], max_tokens: int, num_processes: int
) -> Iterator[int]:
    """Make the parts of all tasks, and yield the number of rows of each task when it is done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, end_with_parent) as pool:
        # A process that is started while signals are blocked never gets them. A terminal sends Ctrl-C to all
        # processes of a command, but only the parent may act on it. It ends its workers by SIGKILL.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            tasks = waiting.items()
            running = [pool.submit(_make_task, path, task, *span, max_tokens) for task, span in tasks]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        try:
            yield from (future.result() for future in as_completed(running))
        except BaseException:  # Ctrl-C too: the parts that were begun are left for the next build to make
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_task(corpus: Corpus | Path, task: Path, start: int, stop: int, max_tokens: int) -> int:
    """Write the parts of the rows from `start` to `stop` as <task>-000 and so on.

    Returns how many rows there are.
    """
    for stale_folder in task.parent.glob(f"{task.name}-*"):  # from a build that was killed
        shutil.rmtree(stale_folder)
    corpus = _open_corpus(corpus) if isinstance(corpus, Path) else corpus
    texts = corpus.iter_contents(start, stop)
    row = start
    names: list[str] = []
    while row < stop:
        names.append(f"{task.name}-{len(names):03d}")
        row += _write_part(texts, task.with_name(names[-1]), row, max_tokens)
    partial = task.with_suffix(".partial")
    partial.write_text(json.dumps(names))
    partial.rename(task.with_suffix(".json"))
    return stop - start


class _TermNumbers(dict):
    """The numbers of words as written: 0 for a word that is not indexed, else its term's number, from 1."""

    def __init__(self) -> None:
        self.of_term: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = _normalize(word)
        number = 0 if term is None else self.of_term.setdefault(term, len(self.of_term) + 1)
        self[word] = number
        return number


def _write_part(texts: Iterable[str], folder: Path, first_row: int, max_tokens: int) -> int:
    """Take texts until they have `max_tokens` words, and write their terms and postings, sorted.

    Returns:
        How many texts were taken.
    """
    numbers = _TermNumbers()
    tokens = array("I")
    text_ends = array("q")
    for text in texts:
        tokens.extend(map(numbers.__getitem__, words(text)))
        text_ends.append(len(tokens))
        if len(tokens) >= max_tokens:
            break
    unsorted = list(numbers.of_term)
    # Python orders strings as UTF-8 orders their bytes.
    order = np.array(sorted(range(len(unsorted)), key=unsorted.__getitem__), np.int64)
    rank_of_number = np.zeros(len(unsorted) + 1, dtype=np.uint64)
    rank_of_number[order + 1] = np.arange(len(unsorted), dtype=np.uint64)

    ids = np.asarray(tokens, dtype=np.uint32)
    text_ids = np.repeat(np.arange(len(text_ends), dtype=np.uint64), np.diff(text_ends, prepend=0))[ids != 0]
    lengths = np.bincount(text_ids.astype(np.int64), minlength=len(text_ends))
    keys = rank_of_number[ids[ids != 0]] << np.uint64(32) | text_ids
    keys.sort()
    firsts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    frequencies = np.diff(firsts, append=len(keys))
    rows = (keys[firsts] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    # Only a frequency that fits into a byte may get a code.
    pairs = (frequencies << 8 | encode_lengths(lengths)[rows])[frequencies < MAX_FREQUENCY]

    folder.mkdir()
    (folder / "terms").write_bytes("\n".join([unsorted[number] for number in order]).encode())
    counts = np.bincount((keys[firsts] >> np.uint64(32)).astype(np.int64), minlength=len(unsorted))
    arrays = {
        "counts": counts.astype(np.uint32),
        "documents": (rows + first_row).astype(np.uint32),
        "frequencies": frequencies.astype(np.uint32),
        "lengths": lengths,
        "pair_counts": np.bincount(pairs, minlength=1 << 16),
    }
    _save(folder, arrays)
    return len(text_ends)


def _save(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)


def _load(part: Path, name: str) -> np.ndarray:
    return np.load(part / f"{name}.npy", mmap_mode="r")


def _terms(part: Path) -> list[bytes]:
    return (part / "terms").read_bytes().split()  # a term has no white space in it


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each of the things of these sizes begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _write_index(parts: list[Path], folder: Path, max_postings: int, progress: Progress) -> IndexHeader:
    """Write all files of the index but the header, and return the header."""
    lengths = np.concatenate([_load(part, "lengths") for part in parts])
    num_filled = int(np.count_nonzero(lengths))
    num_tokens = int(lengths.sum())
    if not num_tokens:
        raise ValueError("the corpus has no words to index (only stop words and punctuation)")
    norms = encode_lengths(lengths)

    progress("merging the terms", 0, 1)
    terms = sorted({term for part in parts for term in _terms(part)})
    (folder / "terms.bin").write_bytes(b"".join(terms))
    term_starts = _starts(np.fromiter(map(len, terms), np.int64, len(terms)))
    number_of = {term: number for number, term in enumerate(terms)}
    num_terms = len(terms)
    del terms
    num_postings = np.zeros(num_terms, dtype=np.int64)
    for part in parts:
        numbers = np.fromiter(map(number_of.__getitem__, _terms(part)), np.uint32)
        np.save(part / "numbers.npy", numbers)
        num_postings[numbers] += _load(part, "counts")
    del number_of
    posting_starts = _starts(num_postings)

    # The most frequent pairs (frequency, norm) get a code. Ties are broken by the order of the pairs.
    pair_counts = np.sum([_load(part, "pair_counts") for part in parts], axis=0)
    chosen = np.argsort(-pair_counts, kind="stable")[:RARE_CODE]
    chosen = chosen[pair_counts[chosen] > 0]
    code_of_pair = np.full(1 << 16, RARE_CODE, dtype=np.uint8)
    code_of_pair[chosen] = np.arange(len(chosen))

    postings_shape = (int(posting_starts[-1]),)
    documents_file = _new_array(folder, "documents", np.uint32, postings_shape)
    codes_file = _new_array(folder, "codes", np.uint8, postings_shape)
    factors = inverse_norms(num_tokens / num_filled)
    num_blocks = -(-len(norms) // SKIP_WIDTH)
    block_starts = np.arange(num_blocks + 1, dtype=np.int64) * SKIP_WIDTH
    skip_terms = np.flatnonzero(num_postings * SKIP_WIDTH >= MIN_SKIPPED * len(norms))
    skips_file = _new_array(folder, "skips", np.uint32, (len(skip_terms), num_blocks + 1))
    block_terms = np.flatnonzero(num_postings * BLOCKED_SHARE >= len(norms))
    shares_shape = (len(block_terms), -(-len(norms) // BLOCK_WIDTH))
    shares_file = _new_array(folder, "block_shares", np.uint8, shares_shape)
    highest = []
    rare_at = []
    rare_frequency = []
    for first, stop, documents, frequencies in _gather(parts, posting_starts, max_postings):
        offset = int(posting_starts[first])
        starts = posting_starts[first : stop + 1] - offset
        norm = norms[documents]
        codes = code_of_pair[np.minimum(frequencies, MAX_FREQUENCY) << 8 | norm]
        documents_file[offset : offset + len(documents)] = documents
        codes_file[offset : offset + len(documents)] = codes
        products = frequencies.astype(np.float32) * factors[norm]
        highest.append(np.maximum.reduceat(products, starts[:-1]))
        rare_at.append(np.flatnonzero(codes == RARE_CODE) + offset)
        rare_frequency.append(frequencies[codes == RARE_CODE])
        for row in range(*np.searchsorted(skip_terms, [first, stop])):
            term = skip_terms[row] - first
            skips_file[row] = np.searchsorted(documents[starts[term] : starts[term + 1]], block_starts)
        for row in range(*np.searchsorted(block_terms, [first, stop])):
            term = block_terms[row] - first
            postings = slice(starts[term], starts[term + 1])
            shares_file[row] = _bound_blocks(documents[postings], products[postings], len(norms))
        progress("writing the postings", int(posting_starts[stop]), int(posting_starts[-1]))
    for file in (documents_file, codes_file, skips_file, shares_file):
        if isinstance(file, np.memmap):
            file.flush()
    arrays = {
        "norms": norms,
        "term_starts": term_starts,
        "posting_starts": posting_starts,
        "pairs": np.stack([chosen >> 8, chosen & 255], axis=1).astype(np.uint8),
        "highest": np.concatenate(highest),
        "rare_at": np.concatenate(rare_at),
        "rare_frequency": np.concatenate(rare_frequency),
        "skip_terms": skip_terms,
        "block_terms": block_terms,
    }
    _save(folder, arrays)
    return IndexHeader(len(norms), num_filled, num_tokens, num_terms, int(posting_starts[-1]))


def _new_array(folder: Path, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array that is a new file of the index. One without values is written at once."""
    path = folder / f"{name}.npy"
    if 0 in shape:  # it can't be mapped
        np.save(path, np.zeros(shape, dtype))
        return np.zeros(shape, dtype)
    return np.lib.format.open_memmap(path, "w+", dtype, shape)


def _bound_blocks(documents: np.ndarray, products: np.ndarray, num_documents: int) -> np.ndarray:
    """Return the largest score of a term in each block of documents: uint8, in steps of its weight.

    A share of the weight is rounded up by more than float32 scores are wrong. `products` are the frequencies
    times inverse_norm of the term's postings.
    """
    shares = np.zeros(-(-num_documents // BLOCK_WIDTH), dtype=np.uint8)
    blocks = (documents >> BLOCK_BITS).astype(np.int64)
    first_of_block = np.flatnonzero(np.diff(blocks, prepend=-1))
    highest = np.maximum.reduceat(products, first_of_block).astype(np.float64)
    steps = np.ceil(highest / (1 + highest) * SHARE_STEPS + SHARE_MARGIN)
    shares[blocks[first_of_block]] = np.minimum(steps, SHARE_STEPS)
    return shares


def _gather(
    parts: list[Path], posting_starts: np.ndarray, max_postings: int
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yield the postings of ranges of terms, sorted by term and row.

    A range has at most `max_postings` postings, or is a single term. Each part holds a range's postings in
    one piece. They are copied to their positions part after part, so that the rows of a term ascend.

    Yields:
        (first term, term to stop at, rows uint32, frequencies uint32).
    """
    next_terms = [0] * len(parts)
    next_postings = [0] * len(parts)
    first = 0
    while first < len(posting_starts) - 1:
        limit = posting_starts[first] + max_postings
        stop = max(first + 1, int(np.searchsorted(posting_starts, limit, side="right")) - 1)
        starts = posting_starts[first : stop + 1] - posting_starts[first]
        documents, frequencies = (np.empty(starts[-1], dtype=np.uint32) for _ in range(2))
        free = starts[:-1].copy()  # the next free position of each term
        for number, part in enumerate(parts):
            numbers = _load(part, "numbers")
            begin = next_terms[number]
            source = next_postings[number]
            end = begin + int(np.searchsorted(numbers[begin:], stop))
            terms = numbers[begin:end].astype(np.int64) - first
            counts = _load(part, "counts")[begin:end].astype(np.int64)
            size = int(counts.sum())
            positions = np.repeat(free[terms] - (np.cumsum(counts) - counts), counts) + np.arange(size)
            documents[positions] = _load(part, "documents")[source : source + size]
            frequencies[positions] = _load(part, "frequencies")[source : source + size]
            free[terms] += counts
            next_terms[number] = end
            next_postings[number] = source + size
        yield first, stop, documents, frequencies
        first = stop
