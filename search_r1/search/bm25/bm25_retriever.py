"""The BM25 retriever: queries to documents by BM25, in this process, without Java.

    queries -> words -> numbers of terms (kept in a dictionary) -> kernel.search -> rows -> corpus lines

With several threads the queries of a batch are shared among them. The search runs without the GIL.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.search.bm25.analysis import normalize, words
from search_r1.search.bm25.build import build_index
from search_r1.search.bm25.index import BLOCK_WIDTH, K1, B, Index, idf, inverse_norms
from search_r1.search.bm25.kernel import BLOCKS_START, GROUP, WINDOW, search
from search_r1.search.corpus import Corpus
from search_r1.search.corpus_files import sidecar_path
from search_r1.search.manifest import MappedFiles, check_manifest
from search_r1.search.search_backend import SearchResult

MAX_UNBUILT_BYTES = 256 * 2**20  # a corpus up to here can be indexed at the start, in about a minute
MAX_KNOWN_WORDS = 200_000  # words of queries whose terms are remembered, about 30 MB
MAX_BATCH = 256  # the most queries in one call of the kernel


class BM25Retriever:
    """A retriever that finds documents by BM25 and scores them as Lucene does.

    It takes the memory of what queries touch of the mapped index.
    """

    name = "bm25"

    def __init__(self, corpus: Corpus, index_path: str | Path | None = None, num_threads: int = 1) -> None:
        """Open the index in the folder `index_path`. If it is None, build one that ends with the process.

        Raises ValueError for an index of another corpus, and for a corpus that is too large to build an index
        now.
        """
        self._corpus = corpus
        self._index_path = None if index_path is None else Path(index_path)
        if self._index_path is not None:
            self._index = Index.open(self._index_path)
            check_manifest(self._index_path, corpus, expected_backend=self.name)
        elif corpus.num_bytes > MAX_UNBUILT_BYTES:
            raise ValueError(
                f"the corpus has {corpus.num_bytes / 1e6:,.0f} MB, and an index is built at the start only "
                f"up to {MAX_UNBUILT_BYTES / 1e6:,.0f} MB. Build it with `python -m "
                f"search_r1.search.index_builder --retrieval_method bm25 --corpus_path {corpus.path} "
                "--save_dir FOLDER` and give --index_path FOLDER/bm25"
            )
        else:
            with tempfile.TemporaryDirectory(prefix="bm25-") as folder:
                build_index(corpus, Path(folder), lambda stage, done, total: None)
                self._index = Index.open(Path(folder))  # the mapped files live on without their names
        if self._index.header.num_documents != len(corpus):
            raise ValueError(
                f"--index_path: {index_path} is an index of {self._index.header.num_documents} documents, "
                f"the corpus has {len(corpus)}: it belongs to another corpus"
            )
        files = [] if self._index_path is None else sorted(self._index_path.iterdir())
        self._mapped = MappedFiles([*files, sidecar_path(corpus.path)])
        self.num_documents = len(corpus)
        self._inverse_norms = inverse_norms(self._index.header.average_length)
        self._terms = _IndexedTermNumbers(self._index)
        self._searchers = [_Searcher(self._index, self._inverse_norms) for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(num_threads, "bm25") if num_threads > 1 else None

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return for each query at most `topk` documents, best first, and their scores.

        Only documents that share a term with the query are found. Raises IndexCut if a file was cut.
        """
        self._mapped.check()
        topk = min(topk, self.num_documents)
        answers: list[tuple[np.ndarray, np.ndarray]] = []  # rows and scores of each query
        for start in range(0, len(queries), MAX_BATCH):
            terms = [self._query_terms(query) for query in queries[start : start + MAX_BATCH]]
            if self._pool is None:
                answers += self._searchers[0].search(terms, topk)
                continue
            num_threads = len(self._searchers)
            numbered = enumerate(self._searchers)
            jobs = [
                self._pool.submit(searcher.search, terms[number::num_threads], topk)
                for number, searcher in numbered
            ]
            results = [iter(job.result()) for job in jobs]
            answers += [next(results[i % len(jobs)]) for i in range(len(terms))]
        documents = [self._corpus.rows(rows.tolist()) for rows, _ in answers]
        return documents, [scores.tolist() for _, scores in answers]

    def _query_terms(self, query: str) -> Counter[int]:
        """Return the numbers of the query's terms that are in the index, and how often the query has each."""
        if len(self._terms) > MAX_KNOWN_WORDS:
            self._terms.clear()
        counts = Counter(map(self._terms.__getitem__, words(query)))
        del counts[-1]
        return counts

    def describe(self) -> dict[str, Any]:
        """Describe what is loaded."""
        header = self._index.header
        return {
            "backend": self.name,
            "index": None if self._index_path is None else str(self._index_path),
            **{name: getattr(header, name) for name in ("num_documents", "num_terms", "num_postings")},
            "average_length": round(header.average_length, 2),
            "index_bytes": self._index.num_bytes,
            "k1": K1,
            "b": B,
        }

    def close(self) -> None:
        """End the threads. The mapped files are given back with the object."""
        self._mapped.close()
        if self._pool is not None:
            self._pool.shutdown()


class _IndexedTermNumbers(dict):
    """The numbers of words' terms, -1 for words that no document has.

    A word is looked up when it is first met.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def __missing__(self, word: str) -> int:
        term = normalize(word)
        number = -1 if term is None else self._index.find_term(term)
        self[word] = number
        return number


class _Searcher:
    """The search of one thread: the index, and arrays that the kernel works in."""

    def __init__(self, index: Index, norms: np.ndarray) -> None:
        self._index = index
        self._inverse_norms = norms
        self._skip_terms = np.append(index.skip_terms, -1)
        self._block_terms = np.append(index.block_terms, -1)
        width = min(WINDOW, index.header.num_documents)
        self._sums = np.full(width, -1.0)
        self._totals = np.empty(max(width, BLOCK_WIDTH))
        self._touched = np.empty(width + 1, dtype=np.int64)
        num_groups = -(-index.block_shares.shape[1] // GROUP)
        self._bounds = np.zeros((GROUP, num_groups), dtype=np.float32)
        self._tops = np.empty(num_groups, dtype=np.float32)
        self.search([Counter([0])], 1)  # loads or compiles the kernel

    def search(self, queries: list[Counter[int]], topk: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return rows (int64) and scores (float32) of the best `topk` documents of each query."""
        index = self._index
        ids = np.array([number for query in queries for number in query], dtype=np.int64)
        counts = np.array([count for query in queries for count in query.values()], dtype=np.float32)
        sizes = np.array([len(query) for query in queries], dtype=np.int64)
        starts = index.posting_starts[ids]
        stops = index.posting_starts[ids + 1]
        weights = counts * idf(index.header.num_filled, stops - starts)
        bounds = weights - weights / (np.float32(1) + index.highest[ids])
        by_bound = np.lexsort((-bounds, np.repeat(np.arange(len(queries)), sizes)))
        skip_of = _find(ids, self._skip_terms)
        block_of = _find(ids, self._block_terms)
        rows = np.empty((len(queries), topk), dtype=np.int64)
        scores = np.empty((len(queries), topk), dtype=np.float32)
        num_found = np.empty(len(queries), dtype=np.int64)
        search(
            starts[by_bound], stops[by_bound], weights[by_bound], bounds[by_bound], skip_of[by_bound],
            block_of[by_bound], np.concatenate([[0], np.cumsum(sizes)]), topk, BLOCKS_START,
            index.documents, index.codes, index.pairs, index.rare_at, index.rare_frequency, index.norms,
            index.skips, index.block_shares, self._inverse_norms, self._sums, self._totals, self._touched,
            self._bounds, self._tops, rows, scores, num_found,
        )  # fmt: skip
        return [(rows[i, :count], scores[i, :count]) for i, count in enumerate(num_found.tolist())]


def _find(ids: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return the position of each id among ascending ones that end in a -1, and -1 for others."""
    positions = np.searchsorted(ascending[:-1], ids)
    return np.where(ascending[positions] == ids, positions, -1)
