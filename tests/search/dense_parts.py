"""What the tests of dense retrieval share."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
from corpus_parts import corpus_of_documents

from search_r1.search.corpus import Corpus

DIMENSION = 24


class HashEncoder:
    """A stand-in for an encoder: each word has a random direction, a text is their sum, of length 1."""

    def __init__(self, dimension: int = DIMENSION, fail_after: int | None = None) -> None:
        self.dimension = dimension
        self.device = SimpleNamespace(type="cpu")
        self.settings: dict[str, Any] = {"model": "hash", "dimension": dimension}
        self.num_passages = 0
        self._fail_after = fail_after

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        sums = [np.sum([self._word(word) for word in text.split() or [""]], axis=0) for text in texts]
        return np.array([row / np.linalg.norm(row) for row in sums], np.float32).reshape(-1, self.dimension)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        self.num_passages += len(texts)
        if self._fail_after is not None and self.num_passages > self._fail_after:
            raise KeyboardInterrupt
        return self.encode_queries(texts)

    def describe(self) -> str:
        return "hash"

    def _word(self, word: str) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(self.dimension)


def make_corpus(num_documents: int) -> Corpus:
    return corpus_of_documents(
        [{"id": str(i), "contents": f'"Title {i}"\nword{i} word{i % 7} common'} for i in range(num_documents)]
    )


def true_top(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float64 [Q, k] and rows, ties by row."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = np.lexsort((np.broadcast_to(np.arange(len(vectors)), scores.shape), -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, rows, 1), rows


def assert_is_top(
    vectors: np.ndarray, queries: np.ndarray, k: int, scores: np.ndarray, rows: np.ndarray
) -> None:
    """The rows are the true top k, but for rows whose scores differ by rounding."""
    expected, expected_rows = true_top(vectors, queries, k)
    assert rows.shape == expected_rows.shape
    size = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=1).max() + 1e-30
    assert (np.abs(scores - expected) <= 1e-6 * size).all()
    chosen = np.take_along_axis(queries.astype(np.float64) @ vectors.astype(np.float64).T, rows, 1)
    assert (np.abs(chosen - expected) <= 1e-6 * size).all()
    assert all(len(set(row)) == len(row) for row in rows.tolist())
