"""Two (or more) backends as one: reciprocal-rank fusion.

    queries -> each backend, in a thread of its own -> its first `depth` documents
            -> score of a document: sum over the backends of 1 / (K + its rank there, from 1)

The method and the value of K are from Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms
Condorcet and individual Rank Learning Methods" (2009). Only ranks count, so scores of different kinds need no
scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from search_r1.search.search_backend import Document, SearchBackend, SearchResult, best_first

K = 60


class HybridRetriever:
    """A fusion of backends over one corpus. They are called at the same time, each from its own thread."""

    def __init__(self, retrievers: list[SearchBackend], depth: int = 100) -> None:
        """Fuse backends.

        Args:
            retrievers: Two backends or more.
            depth: Documents asked of each backend, or more when a query wants more.

        Raises:
            ValueError: If the backends hold different numbers of documents, or if there are fewer than two.
        """
        if len(retrievers) < 2:
            raise ValueError(f"hybrid: found {len(retrievers)} backend, expected at least 2")
        counts = {retriever.num_documents for retriever in retrievers} - {None}
        if len(counts) > 1:
            sizes = ", ".join(f"{retriever.name} has {retriever.num_documents}" for retriever in retrievers)
            raise ValueError(f"hybrid: the backends hold different corpora ({sizes} documents)")
        self.name = "+".join(retriever.name for retriever in retrievers)
        self.num_documents = counts.pop() if counts else None
        self._retrievers = retrievers
        self._depth = depth
        self._threads = ThreadPoolExecutor(len(retrievers), thread_name_prefix="hybrid")

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return each query's best documents of all backends, at most `topk`, and their fused scores."""
        depth = max(topk, self._depth)
        searches = [
            self._threads.submit(retriever.batch_search, queries, depth) for retriever in self._retrievers
        ]
        wait(searches)  # also when one fails, so that the next call finds no other still at work
        rankings = [search.result()[0] for search in searches]
        return best_first((self._fuse(row) for row in zip(*rankings, strict=True)), topk)

    def _fuse(self, rankings: Iterable[list[Document]]) -> list[tuple[Document, float]]:
        """Return all documents of the rankings of one query, with their scores.

        Two rankings have the same document if its row is the same or, where there are no rows, its JSON.
        """
        documents: dict[int | bytes, Document] = {}
        shares: dict[int | bytes, list[float]] = {}
        for ranking in rankings:
            seen: set[int | bytes] = set()
            for rank, document in enumerate(ranking, start=1):
                key = document.json if document.row is None else document.row
                if key not in seen:  # a backend that repeats itself counts once, at the better rank
                    seen.add(key)
                    documents.setdefault(key, document)
                    shares.setdefault(key, []).append(1 / (K + rank))
        return [(document, math.fsum(shares[key])) for key, document in documents.items()]

    def describe(self) -> dict[str, Any]:
        parts = [retriever.describe() for retriever in self._retrievers]
        return {"backend": "hybrid", "depth": self._depth, "k": K, "parts": parts}

    def close(self) -> None:
        self._threads.shutdown()
        for retriever in self._retrievers:
            retriever.close()
