"""Building an index: the same bytes however it is done; a part that is half written is made again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from bm25_reference import Reference

from search_r1.search.bm25 import build, build_index
from search_r1.search.bm25.index import BLOCK_WIDTH, BLOCKED_SHARE, SHARE_STEPS, Index
from search_r1.search.corpus import Corpus


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    found = []
    for row in range(count):
        words = [f"w{int(3000 ** rng.random())}é" for _ in range(rng.choice([0, 2, 30, 60]))]
        found.append(" ".join([*words, f"only{row}", "東京" * (row % 3)]))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"id": str(row), "contents": text}) for row, text in enumerate(texts(600))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Corpus.open(path)


def built(corpus: Corpus, folder: Path, progress=lambda *_: None, **options: int) -> dict:
    """Builds, and returns the files' bytes by name."""
    folder.mkdir(exist_ok=True)
    build_index(corpus, folder, progress, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def in_pieces(monkeypatch):
    """Small tasks, parts and ranges of terms, so that a small corpus has many of each."""
    monkeypatch.setattr(build, "TASK_BYTES", 30_000)
    monkeypatch.setattr(build, "MAX_TOKENS", 1000)
    monkeypatch.setattr(build, "BYTES_PER_POSTING", 3 * 10**6)


def test_the_index_does_not_depend_on_how_the_work_is_cut(corpus, tmp_path, in_pieces, monkeypatch):
    stages = []
    pieces = built(corpus, tmp_path / "pieces", lambda stage, *_: stages.append(stage))
    assert stages.count("writing the postings") > 5 < stages.count("reading the corpus")
    monkeypatch.undo()
    assert built(corpus, tmp_path / "whole") == pieces


@pytest.mark.slow
def test_the_index_does_not_depend_on_the_number_of_processes(corpus, tmp_path, in_pieces):
    several = built(corpus, tmp_path / "several", memory_limit_bytes=2**28, num_processes=3)
    assert several == built(corpus, tmp_path / "one")


def test_the_index_holds_what_the_texts_say(corpus, tmp_path, in_pieces):
    built(corpus, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    reference = Reference(texts(600))
    assert index.header.num_terms == len({term for document in reference.documents for term in document})
    assert index.header.num_tokens == sum(document.total() for document in reference.documents)
    for term in ("w1é", "w2999é", "only17", "東"):
        number = index.find_term(term)
        holding = [row for row, document in enumerate(reference.documents) if term in document]
        if not holding:
            assert number == -1
            continue
        start, stop = index.posting_starts[number : number + 2]
        assert index.documents[start:stop].tolist() == holding
    for term in ("", "a", "w1", "w1éé", "zzz", "京京"):
        assert index.find_term(term) == -1


def test_no_score_is_above_the_bound_of_its_block(corpus, tmp_path, in_pieces):
    built(corpus, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    reference = Reference(texts(600))
    num_frequent = 0
    for number, frequency in enumerate(index.posting_starts[1:] - index.posting_starts[:-1]):
        num_frequent += bool(frequency * BLOCKED_SHARE >= 600)
        assert (frequency * BLOCKED_SHARE >= 600) == (number in index.block_terms)
    assert len(index.block_terms) == num_frequent > 20
    for term in ("w1é", "w2é", "東"):
        shares = index.block_shares[np.searchsorted(index.block_terms, index.find_term(term))]
        highest = np.zeros(len(shares))
        for row, document in enumerate(reference.documents):
            product = float(document[term] * reference.inverse_norms[row])
            block = row // BLOCK_WIDTH
            highest[block] = max(highest[block], product / (1 + product) * SHARE_STEPS)
        assert np.all((shares >= highest) & (shares <= highest + 1.01))
        assert np.all((shares == 0) == (highest == 0))


def test_a_part_that_was_half_written_is_made_again(corpus, tmp_path, in_pieces):
    whole = built(corpus, tmp_path / "whole")
    half = tmp_path / "index" / "work" / "sorted" / "000001-000"
    half.mkdir(parents=True)
    (half / "terms").write_bytes(b"half")
    assert built(corpus, tmp_path / "index") == whole
