"""`BM25Retriever`: what users see of it; an index is used for its own corpus alone."""

from __future__ import annotations

import os

import pytest
from bm25_reference import corpus_of

from search_r1.search.bm25 import BM25Retriever, build_index
from search_r1.search.corpus import Corpus
from search_r1.search.manifest import IndexCut, Manifest, write_manifest

TEXTS = [
    '"Amber Harbor"\nAmber Harbor is a film. Its director is Tomas Weld.',
    '"Tomas Weld"\nTomas Weld is a director who was born in Orlen.',
    '"Orlen"\nOrlen is a town on a river.',
    '"Copper Lantern"\nCopper Lantern is a novel by Ada Quist.',
]


def search(found_by: BM25Retriever, query: str, topk: int = 3) -> list[int | None]:
    return [document.row for document in found_by.batch_search([query], topk)[0][0]]


def test_documents_are_the_lines_of_the_corpus(tmp_path):
    line = b'{"id": 7, "contents": "Orlen",   "more": [1, "\\u00e9"]}'
    (tmp_path / "corpus.jsonl").write_bytes(b'\n{"contents": "other"}\n\n' + line + b"\n")
    found_by = BM25Retriever(Corpus.open(tmp_path / "corpus.jsonl"))
    [[document]], _ = found_by.batch_search(["orlen"], 1)
    assert (document.json, document.row) == (line, 1)


def test_documents_without_a_word_of_the_query_are_not_found():
    found_by = BM25Retriever(corpus_of(TEXTS))
    assert search(found_by, "Quist") == [3]
    for query in ("zebra", "", "the of", "\ud800 ...", "'"):
        assert search(found_by, query) == []
    assert found_by.batch_search([], 3) == ([], [])


def test_a_corpus_without_words_is_refused():
    with pytest.raises(ValueError, match="no words"):
        BM25Retriever(corpus_of(["the", "..."]))


@pytest.fixture
def index(tmp_path):
    """An index of TEXTS with its manifest, as the index builder leaves it."""
    corpus = corpus_of(TEXTS)
    folder = tmp_path / "index"
    folder.mkdir()
    parameters = build_index(corpus, folder, lambda *_: None)
    write_manifest(folder, Manifest("bm25", corpus.fingerprint(), parameters, {}))
    return folder


def test_a_kept_index_answers_like_a_fresh_one(index):
    kept = BM25Retriever(corpus_of(TEXTS), index)
    fresh = BM25Retriever(corpus_of(TEXTS))
    for query in ("director Orlen", "Amber", "zebra"):
        assert kept.batch_search([query], 3) == fresh.batch_search([query], 3)


def test_an_index_of_another_version_is_refused(index):
    header = index / "index.json"
    header.write_text(header.read_text().replace('"analysis_version": 2', '"analysis_version": 1'))
    with pytest.raises(ValueError, match="another version"):
        BM25Retriever(corpus_of(TEXTS), index)


@pytest.mark.parametrize("name", ["documents.npy", "codes.npy", "terms.bin", "norms.npy"])
def test_an_index_with_a_file_cut_short_is_refused(tmp_path, name):
    build_index(corpus_of(TEXTS), tmp_path, lambda *_: None)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        BM25Retriever(corpus_of(TEXTS), tmp_path)


@pytest.mark.parametrize("name", ["documents.npy", "codes.npy", "terms.bin"])
def test_an_index_that_is_cut_beneath_a_server_is_one_line_and_no_sigbus(index, name):
    served = BM25Retriever(corpus_of(TEXTS), index)
    assert search(served, "Quist") == [3]
    os.truncate(index / name, 0)
    for _ in range(2):
        with pytest.raises(IndexCut, match=f"{name} was cut while it was served: found 0 bytes"):
            served.batch_search(["Quist"], 3)
    served.close()


def test_another_index_may_take_the_place_of_one_that_is_served(index):
    served = BM25Retriever(corpus_of(TEXTS), index)
    index.rename(index.with_name("old"))
    index.mkdir()
    (index / "documents.npy").write_bytes(b"")
    assert search(served, "Quist") == [3]
    served.close()
