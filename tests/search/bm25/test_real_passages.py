"""BM25 on real questions: how often the passage that holds the answer is among the first three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus_parts import corpus_of_documents

from search_r1.search.bm25 import BM25Retriever

DATA = Path(__file__).parents[4] / "shared" / "data"
XQUAD = DATA / "xquad.en.json"
PASSAGES = DATA / "2wikimultihopqa_corpus.json"


def real_world() -> tuple[list[dict], list[tuple[str, int]]]:
    """Passages, and questions with the row of the passage that answers them."""
    if not XQUAD.exists() or not PASSAGES.exists():
        pytest.skip(f"the data sets are not in {DATA}")
    documents: list[dict] = []
    questions: list[tuple[str, int]] = []
    for article in json.loads(XQUAD.read_text(encoding="utf-8"))["data"]:
        title = article["title"].replace("_", " ")
        for paragraph in article["paragraphs"]:
            questions += [(qa["question"], len(documents)) for qa in paragraph["qas"]]
            documents.append({"id": str(len(documents)), "contents": f'"{title}"\n{paragraph["context"]}'})
    for passage in json.loads(PASSAGES.read_text(encoding="utf-8")):
        documents.append({"id": str(len(documents)), "contents": f'"{passage["title"]}"\n{passage["text"]}'})
    assert (len(documents), len(questions)) == (6359, 1190)
    return documents, questions


@pytest.mark.slow
def test_the_gold_passage_of_94_of_100_questions_is_in_the_top_3():
    documents, questions = real_world()
    retriever = BM25Retriever(corpus_of_documents(documents))
    found, _ = retriever.batch_search([question for question, _ in questions], topk=3)
    hits = [
        any(document.row == gold for document in row) for row, (_, gold) in zip(found, questions, strict=True)
    ]
    assert sum(hits) / len(hits) >= 0.94


@pytest.mark.slow
def test_the_answers_are_lucenes(tmp_path):
    """The same top 10 with the same scores, where scores don't tie (Lucene gives four decimals)."""
    from search_r1.search import lucene

    try:
        lucene.check_java()
    except ValueError as error:
        pytest.skip(str(error))
    documents, questions = real_world()
    corpus = corpus_of_documents(documents)
    lucene.build_index(corpus, tmp_path, 1, lambda *_: None)
    queries = [question for question, _ in questions]
    theirs, their_scores = lucene.LuceneRetriever(corpus, tmp_path).batch_search(queries, 10)
    ours, our_scores = BM25Retriever(corpus).batch_search(queries, 10)
    for mine, my_scores, right, scores in zip(ours, our_scores, theirs, their_scores, strict=True):
        assert my_scores == pytest.approx(scores, abs=1e-3)
        rank_of = {document.row: place for place, document in enumerate(mine)}
        for place, document in enumerate(right):
            tied = scores[place] < scores[-1] + 1e-3
            assert tied or abs(my_scores[rank_of[document.row]] - scores[place]) < 1e-3
