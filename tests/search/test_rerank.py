"""Reranking by a tiny cross-encoder with random weights, compared with the network called pair by pair."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from corpus_parts import corpus_of_documents
from tiny_cross_encoder import WORDS, save_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)

from search_r1.search.rerank import DECIMALS, CrossEncoder, RerankRetriever
from search_r1.search.search_backend import SearchResult

CORPUS = corpus_of_documents(
    [
        {"id": str(row), "contents": " ".join(WORDS[(row * 7 + word) % 50] for word in range(2 + row % 9))}
        for row in range(40)
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("one") / "model", 1))


class FirstRows:
    """Finds the first rows of the corpus, whatever is asked; query number n starts at row 3 n."""

    name = "first"
    num_documents = len(CORPUS)
    depth = 0
    closed = False

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        self.depth = topk
        found = [CORPUS.rows(range(3 * n, min(3 * n + topk, len(CORPUS)))) for n in range(len(queries))]
        return found, [[0.5] * len(row) for row in found]

    def describe(self) -> dict:
        return {"backend": "first"}

    def close(self) -> None:
        self.closed = True


def direct(model: str, query: str, passage: str) -> torch.Tensor:
    """The logits of one pair, by the network alone."""
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        return network(**tokenizer(query, passage, return_tensors="pt")).logits[0]


def test_each_query_is_paired_with_its_own_documents_and_ordered_by_the_networks_score(model):
    queries = ["w1 w2", "w30 w31 w32 w33", "w9"]
    found, scores = RerankRetriever(FirstRows(), CrossEncoder(model), 8).batch_search(queries, 5)
    for number, query in enumerate(queries):
        candidates = CORPUS.rows(range(3 * number, 3 * number + 8))
        expected = sorted(
            ((torch.sigmoid(direct(model, query, each.contents)[0]).item(), each.row) for each in candidates),
            reverse=True,
        )[:5]
        assert [document.row for document in found[number]] == [row for _, row in expected]
        assert scores[number] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_a_score_does_not_depend_on_the_batch_but_for_its_last_digit(model):
    queries = [f"w{number} w{number + 3}" for number in range(9)]
    one_by_one = CrossEncoder(model, batch_size=1)
    together = CrossEncoder(model, batch_size=7)
    pairs = [(query, document.contents) for query in queries for document in CORPUS.rows(range(12))]
    alone = [one_by_one.logits([pair])[0].item() for pair in pairs]  # at most one step of the rounding apart
    assert together.logits(pairs).tolist() == pytest.approx(alone, abs=1.01 * 10**-DECIMALS)


def test_the_asked_topk_is_respected_and_deepens_the_search(model):
    inner = FirstRows()
    retriever = RerankRetriever(inner, CrossEncoder(model), retrieval_topk=6)
    for topk, depth in ((2, 6), (6, 6), (20, 20)):
        [found], [scores] = retriever.batch_search(["w1"], topk)
        assert (len(found), len(scores), inner.depth) == (topk, topk, depth)
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_raw_logits_where_the_models_card_has_it_so(tmp_path, model, config):
    folder = tmp_path / "raw"
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    [raw] = CrossEncoder(str(folder)).score([("w1", "w2 w3")])
    assert raw == pytest.approx(direct(model, "w1", "w2 w3")[0].item(), abs=1e-4)
    [squashed] = CrossEncoder(model).score([("w1", "w2 w3")])
    assert squashed == pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-4)


def test_long_pairs_are_cut_to_what_the_model_reads(model):
    encoder = CrossEncoder(model)
    long_query = "w1 " * 5000
    long_passage = "w2 " * 5000
    both, short_query, cut = encoder.score(
        [(long_query, long_passage), ("w1", long_passage), ("w1", "w2 " * 90)]
    )
    assert short_query == cut
    assert [both] == encoder.score([("w1 " * 32, "w2 " * 29)]), (
        "64 tokens: half for the query, 3 special ones"
    )


def test_a_model_without_a_trained_head_is_refused(tmp_path, model):
    folder = tmp_path / "encoder"
    BertModel(BertConfig.from_pretrained(model)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    with pytest.raises(ValueError, match="is no cross-encoder: it has no weights for classifier"):
        CrossEncoder(str(folder))


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="--reranker_model: can't load .*nowhere") as error:
        CrossEncoder(str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)
