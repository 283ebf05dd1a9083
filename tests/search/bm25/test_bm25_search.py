"""The answers of the index: those of the formula, for any corpus and any query."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys

import pytest
from bm25_reference import Reference, corpus_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_r1.search.bm25 import BM25Retriever

WORDS = [*"abcdefgh", "fox", "owls", "the", "été", "東京", "o'brien's", "3.5"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)
QUERY = st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=12).map(" ".join)


def answer(retriever: BM25Retriever, query: str, topk: int) -> list[tuple[int | None, float]]:
    [documents], [scores] = retriever.batch_search([query], topk)
    return [(document.row, score) for document, score in zip(documents, scores, strict=True)]


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of 64 documents, so that small corpora have many."""
    monkeypatch.setattr("search_r1.search.bm25.bm25_retriever.WINDOW", 64)


@pytest.fixture(params=[math.inf, -math.inf], ids=["by documents", "by blocks"])
def way(request, monkeypatch):
    """Make every query be answered by documents, or by blocks, whatever it costs."""
    monkeypatch.setattr("search_r1.search.bm25.bm25_retriever.BLOCKS_START", request.param)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=1, max_size=60), st.lists(QUERY, min_size=1, max_size=4), st.integers(1, 70))
def test_answers_are_those_of_looking_at_every_document(way, texts, queries, topk):
    texts = [*texts, "fox"]  # at least one word
    retriever = BM25Retriever(corpus_of(texts))
    reference = Reference(texts)
    for query in queries:
        assert answer(retriever, query, topk) == reference.search(query, topk)


def zipf_texts(count: int, seed: int) -> list[str]:
    """Texts with frequent and rare words, some of them empty, some long, many equal."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        length = rng.choice([0, 1, 3, 20, 20, 300])
        texts.append(" ".join(f"w{int(400 ** rng.random())}" for _ in range(length)))
    return texts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("topk", [1, 3, 64, 1000])
def test_pruning_over_many_windows_loses_nothing(seed, topk, way, small_windows):
    texts = zipf_texts(1500, seed)
    retriever = BM25Retriever(corpus_of(texts))
    reference = Reference(texts)
    rng = random.Random(seed)
    for num_words in (1, 2, 4, 10):
        query = " ".join(f"w{int(400 ** rng.random())}" for _ in range(num_words))
        assert answer(retriever, query, topk) == reference.search(query, topk)


def test_a_query_of_16_000_characters_is_answered(way, small_windows):
    texts = zipf_texts(300, seed=5)
    query = " ".join(f"w{i % 450}" for i in range(3500))[:16_000]
    assert answer(BM25Retriever(corpus_of(texts)), query, 10) == Reference(texts).search(query, 10)


def test_frequencies_and_lengths_beyond_the_codes_count_in_full(way):
    # More than 255 different (frequency, length) pairs, and frequencies above 255 and 65,535.
    texts = [f"{'fox ' * i}{'owl ' * (3 * i % 1000)}" for i in range(1, 400)]
    texts += ["fox " * 300 + "owl", "fox " * 70_000, "fox " * 255, "fox " * 256, "fox " * 254]
    retriever = BM25Retriever(corpus_of(texts))
    reference = Reference(texts)
    assert len(retriever._index.rare_at) > 0
    for query in ("fox", "owl", "fox owl owl"):
        for topk in (5, 500):
            assert answer(retriever, query, topk) == reference.search(query, topk)


SMALL_CORPUS = """
import math
from bm25_reference import Reference, corpus_of
from search_r1.search.bm25 import BM25Retriever, bm25_retriever
bm25_retriever.BLOCKS_START = -math.inf
texts = ["fox", "owl fox", "bear"] * 43
[documents], _ = BM25Retriever(corpus_of(texts)).batch_search(["fox owl"], 3)
assert [document.row for document in documents] == [row for row, _ in Reference(texts).search("fox owl", 3)]
"""


def test_a_search_by_blocks_reads_nothing_beyond_the_last_block():
    # Not compiled, it raises IndexError for such a read.
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", SMALL_CORPUS], env=environment, check=True)


def test_equal_scores_keep_the_order_of_the_corpus(way, small_windows):
    retriever = BM25Retriever(corpus_of(["other words"] + ["the same text"] * 500 + ["same"]))
    for topk in (1, 3, 64, 65, 499):
        assert [row for row, _ in answer(retriever, "text", topk)] == list(range(1, topk + 1))


def test_a_query_of_frequent_words_alone_is_answered_by_blocks(monkeypatch):
    searched_by_blocks = []
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["fox", "owl", "bear"], k=20)) for _ in range(20_000)]
    retriever = BM25Retriever(corpus_of(texts))
    bounds = retriever._searchers[0]._bounds
    for query in ("fox owl", "bear"):
        bounds[:] = 0
        answer(retriever, query, 3)
        searched_by_blocks.append(bool(bounds.any()))
    monkeypatch.setattr("search_r1.search.bm25.bm25_retriever.BLOCKS_START", math.inf)
    bounds[:] = 0
    answer(retriever, "fox owl", 3)
    assert searched_by_blocks == [True, True] and not bounds.any()
