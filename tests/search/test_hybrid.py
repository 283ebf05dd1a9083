"""Reciprocal-rank fusion: scores by hand, ties, depth, and what is refused."""

from __future__ import annotations

import threading

import pytest
from corpus_parts import corpus_of_documents

from search_r1.search.hybrid import HybridRetriever
from search_r1.search.search_backend import Document, RetrievalUnavailable, SearchResult

CORPUS = corpus_of_documents([{"id": str(row), "contents": f"passage {row}"} for row in range(300)])


class Ranked:
    """Answers each query with these rows."""

    def __init__(self, name: str, rows: list[int], meet: threading.Barrier | None = None) -> None:
        self.name = name
        self.num_documents = len(CORPUS)
        self.rows = rows
        self.meet = meet
        self.asked: list[int] = []
        self.num_closed = 0

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        self.asked.append(topk)
        if self.meet is not None:
            self.meet.wait(timeout=10)
        rows = self.rows[:topk]
        return [CORPUS.rows(rows) for _ in queries], [[1.0] * len(rows) for _ in queries]

    def describe(self) -> dict:
        return {"backend": self.name}

    def close(self) -> None:
        self.num_closed += 1


def rows(found: list[Document]) -> list[int | None]:
    return [document.row for document in found]


def test_the_score_is_the_sum_of_reciprocal_ranks():
    hybrid = HybridRetriever([Ranked("bm25", [5, 7, 9]), Ranked("e5", [7, 3])])
    [found], [scores] = hybrid.batch_search(["q"], 10)
    assert rows(found) == [7, 5, 3, 9]
    assert scores == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63])
    assert found[0].fields == {"id": "7", "contents": "passage 7"}


def test_topk_cuts_after_the_fusion_and_depth_grows_with_it():
    first = Ranked("bm25", list(range(200)))
    second = Ranked("e5", list(range(150, 300)))
    hybrid = HybridRetriever([first, second], depth=20)
    found, scores = hybrid.batch_search(["q", "r"], 3)
    assert [len(row) for row in found] == [len(row) for row in scores] == [3, 3]
    hybrid.batch_search(["q"], 120)
    assert first.asked == second.asked == [20, 120]


def test_equal_scores_are_ordered_by_row():
    [found], _ = HybridRetriever([Ranked("a", [9, 8, 2]), Ranked("b", [1, 8, 0])]).batch_search(["q"], 9)
    assert rows(found) == [8, 1, 9, 0, 2]


def test_a_backend_that_is_out_of_reach_is_not_hidden():
    class Down(Ranked):
        def batch_search(self, queries: list[str], topk: int) -> SearchResult:
            raise RetrievalUnavailable("over its limit")

    with pytest.raises(RetrievalUnavailable, match="over its limit"):
        HybridRetriever([Ranked("a", [1]), Down("b", [])]).batch_search(["q"], 1)


def test_backends_of_different_corpora_are_refused():
    other = Ranked("e5", [])
    other.num_documents = 17
    with pytest.raises(ValueError, match="bm25 has 300, e5 has 17 documents"):
        HybridRetriever([Ranked("bm25", []), other])
    with pytest.raises(ValueError, match="expected at least 2"):
        HybridRetriever([other])
