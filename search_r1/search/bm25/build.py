"""Builds an index out of core: `build_index(corpus, folder, options, progress)`.

    corpus -> spill (several processes) -> parts -> merge_terms -> terms -> write_postings -> files of Index

Memory stays under `memory_limit_bytes` whatever the size of the corpus; the disk holds the postings twice
for a while. Each step leaves files behind in `<folder>/work`, so that a build that was killed goes on when
called again. The finished files are the same bytes for any limit and any number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.search.bm25.index import (
    HEADER_NAME,
    RARE_CODE,
    IndexHeader,
    encode_lengths,
    inverse_norms,
    read_header,
    write_header,
)
from search_r1.search.bm25.postings import BYTES_PER_POSTING, Merge, join_chunks, write_postings
from search_r1.search.bm25.spill import BYTES_PER_TOKEN, spill, spill_rows
from search_r1.search.bm25.terms import map_array, merge_terms
from search_r1.search.child_process import end_with_parent, signals_held
from search_r1.search.corpus import Corpus
from search_r1.search.corpus_files import Progress

TASK_BYTES = 32 * 2**20  # of the corpus; what is done again after a kill
MAX_TOKENS = 1 << 23  # of a part


@dataclass(frozen=True)
class BM25BuildOptions:
    """How to build; the index does not depend on it.

    memory_limit_bytes: for all processes together, at least 256 MiB.
    num_processes: that read and cut the texts into words; 0: one for each CPU that this process may use.
    """

    memory_limit_bytes: int = 4 * 2**30
    num_processes: int = 0

    def __post_init__(self) -> None:
        if self.memory_limit_bytes < 256 * 2**20:
            raise ValueError(f"memory_limit_bytes: found {self.memory_limit_bytes}, expected 256 MiB or more")
        if self.num_processes < 0:
            raise ValueError(f"num_processes: found {self.num_processes}, expected 0 (all CPUs) or more")


def build_index(
    corpus: Corpus, folder: Path, options: BM25BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Writes the index of `corpus` into `folder`, which exists; returns its parameters for the manifest.

    Goes on from what an earlier call left in `folder`. progress(stage, done, total) is called between steps.
    Raises ValueError for a broken line of the corpus and for a corpus without words.
    """
    work = folder / "work"
    if (folder / HEADER_NAME).exists():  # killed while `work` was removed
        header = read_header(folder)
    else:
        header = _write_files(corpus, folder, work, options, progress)
        write_header(folder, header)
    if work.exists():
        shutil.rmtree(work)
    return asdict(header)


def _write_files(
    corpus: Corpus, folder: Path, work: Path, options: BM25BuildOptions, progress: Progress
) -> IndexHeader:
    parts = _spill_corpus(corpus, work, options, progress)
    lengths = np.concatenate([np.fromfile(part / "lengths", np.int64) for part in parts])
    if not lengths.any():
        raise ValueError("the corpus has no words to index (only stop words and punctuation)")
    norms = encode_lengths(lengths)
    np.save(folder / "norms.npy", norms)

    progress("merging the terms", 0, 1)
    num_terms, firsts = merge_terms(parts, folder)
    _save_starts(work / "parts" / "all_lengths", folder / "term_starts.npy")
    posting_starts = _save_starts(work / "parts" / "all_counts", folder / "posting_starts.npy")
    pairs, code_of_pair = _choose_pairs(parts)
    np.save(folder / "pairs.npy", pairs)

    num_filled, num_tokens = int(np.count_nonzero(lengths)), int(lengths.sum())
    merge = Merge(
        parts=parts,
        firsts=firsts,
        numbers=map_array(work / "parts" / "numbers", np.uint32),
        counts=map_array(work / "parts" / "counts", np.uint32),
        posting_starts=posting_starts,
        norms=norms,
        inverse_norms=inverse_norms(num_tokens / num_filled),
        code_of_pair=code_of_pair,
    )
    chunks_folder = work / "chunks"
    chunks_folder.mkdir(exist_ok=True)
    max_postings = options.memory_limit_bytes // 4 // BYTES_PER_POSTING

    def report(done: int, total: int) -> None:
        progress("writing the postings", done, total)

    chunks = write_postings(merge, folder, chunks_folder, max_postings, report)
    for name in ("highest", "rare_at", "rare_frequency", "skip_terms", "skips"):
        np.save(folder / f"{name}.npy", join_chunks(chunks, name))
    return IndexHeader(
        num_documents=len(norms),
        num_filled=num_filled,
        num_tokens=num_tokens,
        num_terms=num_terms,
        num_postings=int(posting_starts[-1]),
    )


def _spill_corpus(corpus: Corpus, work: Path, options: BM25BuildOptions, progress: Progress) -> list[Path]:
    """The parts of the whole corpus, in order of rows; makes those that are not there yet."""
    folder = work / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    tasks = _plan_tasks(corpus)
    waiting = [task for task in tasks if not (folder / f"{task:06d}.json").exists()]
    num_processes = min(options.num_processes or len(os.sched_getaffinity(0)), len(tasks))
    max_tokens = min(MAX_TOKENS, options.memory_limit_bytes // num_processes // BYTES_PER_TOKEN)
    num_done = len(corpus) - sum(tasks[task][1] - tasks[task][0] for task in waiting)
    progress("reading the corpus", num_done, len(corpus))
    if corpus.path is None or num_processes == 1 or len(waiting) < 2:
        finished = _spill_here(corpus, tasks, waiting, folder, max_tokens)
    else:
        finished = _spill_in_processes(corpus.path, tasks, waiting, folder, max_tokens, num_processes)
    for task in finished:
        num_done += tasks[task][1] - tasks[task][0]
        progress("reading the corpus", num_done, len(corpus))
    names = (json.loads((folder / f"{task:06d}.json").read_text(encoding="utf-8")) for task in tasks)
    return [folder / name for task_names in names for name in task_names]


Tasks = dict[int, tuple[int, int]]
"""Rows [start, stop) of each task, by its number."""


def _spill_here(
    corpus: Corpus, tasks: Tasks, waiting: list[int], folder: Path, max_tokens: int
) -> Iterator[int]:
    """Does the tasks that wait in this process; yields each when it is done."""
    for task in waiting:
        start, stop = tasks[task]
        spill(corpus.iter_contents(start, stop), start, folder, task, max_tokens)
        yield task


def _spill_in_processes(
    path: Path, tasks: Tasks, waiting: list[int], folder: Path, max_tokens: int, num_processes: int
) -> Iterator[int]:
    """The same in several processes."""
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(num_processes, context, end_with_parent) as pool:
        with signals_held():
            running = {
                pool.submit(spill_rows, path, *tasks[task], folder, task, max_tokens): task
                for task in waiting
            }
        try:
            for future in as_completed(running):
                future.result()
                yield running[future]
        except BrokenProcessPool:
            raise ValueError(
                "a process of the builder was killed, probably for want of memory: start the build again "
                "with a smaller memory limit or fewer processes; it goes on from here"
            ) from None
        except BaseException:  # Ctrl-C too: a part that was begun is not waited for, the next build makes it
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _plan_tasks(corpus: Corpus) -> Tasks:
    """Ranges of rows of about TASK_BYTES, by number."""
    rows = max(1, len(corpus) * TASK_BYTES // corpus.num_bytes)
    return {
        number: (start, min(start + rows, len(corpus)))
        for number, start in enumerate(range(0, len(corpus), rows))
    }


def _choose_pairs(parts: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The RARE_CODE most frequent (frequency, norm) [C, 2] and the code of each pair [65536], all uint8."""
    counts = np.sum([np.fromfile(part / "pair_counts", np.int64) for part in parts], axis=0)
    order = np.argsort(-counts, kind="stable")[:RARE_CODE]
    chosen = order[counts[order] > 0]
    code_of_pair = np.full(1 << 16, RARE_CODE, dtype=np.uint8)
    code_of_pair[chosen] = np.arange(len(chosen))
    return np.stack([chosen >> 8, chosen & 255], axis=1).astype(np.uint8), code_of_pair


def _save_starts(sizes_path: Path, target: Path) -> np.ndarray:
    """Where each of the things begins whose sizes (int64) are in a file, and where the last ends."""
    sizes = np.fromfile(sizes_path, np.int64)
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    np.save(target, starts)
    return starts
