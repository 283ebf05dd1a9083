"""The corpus reader and BM25: right scores, stable order, an index that is kept only for its own corpus."""

from __future__ import annotations

import json
import math

import pytest

from search_r1.search import bm25
from search_r1.search.bm25 import Analyzer, BM25Retriever
from search_r1.search.corpus import read_corpus

TEXTS = [
    '"Amber Harbor"\nAmber Harbor is a film. Its director is Tomas Weld.',
    '"Tomas Weld"\nTomas Weld is a director who was born in Orlen.',
    '"Orlen"\nOrlen is a town on a river.',
    '"Copper Lantern"\nCopper Lantern is a novel by Ada Quist.',
]


def documents(texts: list[str]) -> list[dict]:
    return [{"id": str(i), "contents": text} for i, text in enumerate(texts)]


def ids(found: list[dict]) -> list[str]:
    return [str(document["id"]) for document in found]


def search(retriever: BM25Retriever, query: str, topk: int = 3) -> list[str]:
    return ids(retriever.batch_search([query], topk)[0][0])


@pytest.mark.parametrize(
    "text, terms",
    [
        ("The N.A.T.O. film's Directors", ["n.a.t.o", "film", "director"]),
        ("O’Brien's dog-house, 3.5 miles", ["o'brien", "dog", "hous", "3.5", "mile"]),
        ("snake_case ÉTÉ 東京", ["snake", "case", "été", "東京"]),
        ("the of and", []),
        ("", []),
    ],
)
def test_the_analysis_of_a_text(text, terms):
    assert Analyzer()(text) == terms


def test_the_document_about_the_query_comes_first():
    retriever = BM25Retriever(documents(TEXTS))
    assert search(retriever, "Who directed Amber Harbor?")[0] == "0"
    assert search(retriever, "where was tomas weld born")[0] == "1"
    assert search(retriever, "ORLEN's rivers")[0] == "2"


def test_scores_are_lucenes_formula():
    texts = ["red fox", "red red owl owl owl", "blue"]
    retriever = BM25Retriever(documents(texts))
    found, scores = retriever.batch_search(["red owl"], 3)
    average = (2 + 5 + 1) / 3

    def term(count: int, length: int, holding: int) -> float:
        idf = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        return idf * count / (count + 0.9 * (1 - 0.4 + 0.4 * length / average))

    expected = {"0": term(1, 2, 2), "1": term(2, 5, 2) + term(3, 5, 1)}
    assert ids(found[0]) == ["1", "0"]
    assert scores[0] == pytest.approx([expected["1"], expected["0"]], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus():
    retriever = BM25Retriever(documents(["other words"] + ["the same text"] * 50))
    for topk in (1, 3, 49):
        assert search(retriever, "same text", topk) == [str(i) for i in range(1, topk + 1)]


def test_more_documents_than_there_are_may_be_asked_for():
    retriever = BM25Retriever(documents(TEXTS))
    assert sorted(search(retriever, "is", 1000)) == []  # a stop word
    assert sorted(search(retriever, "film director novel town", 1000)) == ["0", "1", "2", "3"]


def test_documents_without_a_word_of_the_query_are_not_found():
    retriever = BM25Retriever(documents(TEXTS))
    assert search(retriever, "Quist") == ["3"]
    assert search(retriever, "zebra") == []
    assert search(retriever, "") == []


def test_each_query_of_a_batch_gets_the_answer_that_it_gets_alone():
    retriever = BM25Retriever(documents(TEXTS))
    queries = ["film", "", "Orlen", "zebra", "director"]
    found, scores = retriever.batch_search(queries, 2)
    assert [ids(row) for row in found] == [search(retriever, query, 2) for query in queries]
    assert [len(row) for row in found] == [len(row) for row in scores]


def test_a_corpus_without_words_is_refused():
    with pytest.raises(ValueError, match="no words"):
        BM25Retriever(documents(["the", "..."]))


def test_a_kept_index_answers_like_a_fresh_one_and_is_not_built_again(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "index"
    folder.parent.mkdir()
    fresh = BM25Retriever(documents(TEXTS), folder)
    monkeypatch.setattr(BM25Retriever, "_build", lambda self: pytest.fail("built again"))
    kept = BM25Retriever(documents(TEXTS), folder)
    for query in ("director Orlen", "Amber", "zebra"):
        assert kept.batch_search([query], 3) == fresh.batch_search([query], 3)


def test_an_index_of_another_corpus_is_built_anew(tmp_path):
    BM25Retriever(documents(TEXTS), tmp_path / "index")
    changed = documents([*TEXTS[:3], '"Zebra"\nA zebra.'])
    assert search(BM25Retriever(changed, tmp_path / "index"), "zebra") == ["3"]
    assert search(BM25Retriever(changed, tmp_path / "index"), "zebra") == ["3"]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_an_index_of_another_analysis_is_built_anew(tmp_path, monkeypatch):
    BM25Retriever(documents(TEXTS), tmp_path / "index")
    monkeypatch.setattr(bm25, "ANALYSIS_VERSION", bm25.ANALYSIS_VERSION + 1)
    BM25Retriever(documents(TEXTS), tmp_path / "index")
    kept = json.loads((tmp_path / "index" / bm25.FINGERPRINT_FILE).read_text())
    assert kept["analysis"] == bm25.ANALYSIS_VERSION


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "segments_1").write_text("lucene")
    with pytest.raises(ValueError, match="not a BM25 index of this server"):
        BM25Retriever(documents(TEXTS), tmp_path)
    assert (tmp_path / "segments_1").read_text() == "lucene"


def test_a_corpus_keeps_all_fields_and_skips_blank_lines(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "contents": "x", "more": [1]}\n\n{"contents": "y"}\n', encoding="utf-8")
    assert read_corpus(path) == [{"id": "a", "contents": "x", "more": [1]}, {"contents": "y"}]


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"id": 1, "contents": "x"', "not valid JSON"),
        (b"[1]", "found a JSON list"),
        (b'{"id": 1, "text": "x"}', "found 'id', 'text'"),
        (b'{"contents": null}', "found 'contents'"),
        (b"{}", "found no fields"),
        (b'{"contents": "\xff"}', "not UTF-8"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path, line, problem):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"contents": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"corpus.jsonl, line 3: .*{problem}"):
        read_corpus(path)


def test_a_missing_or_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        read_corpus(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no documents"):
        read_corpus(tmp_path / "empty.jsonl")
