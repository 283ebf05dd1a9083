"""The retrieval server over real HTTP: Search-R1's JSON, and a clear 4xx for whatever can't be served."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_parts import DOCUMENTS, EchoRetriever, http, post

from search_r1.search.client import SearchClient
from search_r1.search.serving import retrieve_endpoint
from search_r1.search.serving.service import RetrievalService
from verl.utils import serving as door

CURLS_TYPE = "application/x-www-form-urlencoded"  # of -d, if nobody names another


@pytest.fixture(scope="module")
def client(serve_documents) -> Iterator[httpx.Client]:
    with serve_documents(DOCUMENTS) as address, http(address) as client:
        yield client


def test_the_reply_with_scores_is_search_r1s(client):
    reply = post(client, {"queries": ["director Tomas", "town"], "topk": 2, "return_scores": True}).json()
    assert list(reply) == ["result"]
    first, second = reply["result"]
    assert [hit["document"] for hit in first] == [DOCUMENTS[1], DOCUMENTS[0]]
    assert first[0]["score"] > first[1]["score"] > 0
    assert [hit["document"]["id"] for hit in second] == ["c"]


@pytest.mark.parametrize("num_queries", [0, 1, 2, 3])
def test_without_scores_each_query_gets_a_list_of_plain_documents(client, num_queries):
    queries = ["town", "film", "zebra"][:num_queries]
    expected = [[DOCUMENTS[2]], [DOCUMENTS[0]], []][:num_queries]
    for body in ({"queries": queries}, {"queries": queries, "return_scores": False}):
        assert post(client, body).json() == {"result": expected}


@pytest.mark.parametrize("topk", [0, -1, 1001, 2**40, 2.5, "3", True, [3]])
def test_a_topk_that_cannot_be_served_is_refused_with_the_range(client, topk):
    response = post(client, {"queries": ["town"], "topk": topk})
    assert response.status_code == 422
    assert "1 to 1000" in response.json()["detail"]


@pytest.mark.parametrize(
    "body", [[], "x", 7, {}, {"queries": "town"}, {"queries": [1]}, {"queries": None}, {"queries": [None]}]
)
def test_a_body_of_another_shape_is_refused(client, body):
    response = post(client, body)
    assert response.status_code == 422
    assert "queries" in response.json()["detail"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(client, raw):
    response = client.post("/retrieve", content=raw)
    assert response.status_code == 400
    assert "JSON" in response.json()["detail"]


def test_limits_on_query_length_number_and_body_size(client, monkeypatch):
    assert post(client, {"queries": ["a" * 16_384]}).status_code == 200
    long = post(client, {"queries": ["town", "a" * 1_000_000]})
    assert (long.status_code, "1000000 characters" in long.text) == (413, True)
    monkeypatch.setattr(retrieve_endpoint, "MAX_QUERIES", 5)
    assert post(client, {"queries": ["town"] * 5}).status_code == 200
    assert post(client, {"queries": ["town"] * 6}).status_code == 413
    monkeypatch.setattr(door, "MAX_BODY_BYTES", 100)
    assert post(client, {"queries": ["town"]}).status_code == 200
    assert "too large" in post(client, {"queries": ["town"] * 30}).text


def test_while_loading_health_answers_and_retrieve_says_503(serve):
    release = threading.Event()

    def load() -> EchoRetriever:
        service.progress = "reading the corpus"
        release.wait(10)
        return EchoRetriever()

    service = RetrievalService(load, "corpus.jsonl", "bm25", topk=3)
    loading = service.start_loading()
    with serve(service) as address, http(address) as client:
        health = client.get("/health").json()
        assert {
            key: health[key] for key in ("status", "backend", "corpus_path", "num_documents", "loaded")
        } == {
            "status": "loading",
            "backend": "bm25",
            "corpus_path": "corpus.jsonl",
            "num_documents": None,
            "loaded": None,
        }
        assert health["progress"] == "reading the corpus"
        response = post(client, {"queries": ["x"]})
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "loading" in response.json()["detail"]
        assert post(client, {"queries": ["x"], "topk": 0}).status_code == 422
        release.set()
        loading.join(timeout=10)
        health = client.get("/health").json()
        assert (health["status"], health["backend"], health["progress"]) == ("ready", "echo", "ready")
        assert health["loaded"] == {"backend": "echo"}
        assert post(client, {"queries": ["town"]}).status_code == 200


def test_the_client_waits_for_a_server_that_is_loading(serve, monkeypatch):
    monkeypatch.setattr(retrieve_endpoint, "LOADING_RETRY_SECONDS", 1)
    release = threading.Event()

    def load() -> EchoRetriever:
        release.wait(10)
        return EchoRetriever()

    service = RetrievalService(load, "corpus.jsonl", "bm25", topk=3)
    service.start_loading()
    with serve(service) as address, SearchClient(address, timeout=20) as search:
        future = search.submit(["town"])[0]
        time.sleep(0.2)
        assert not future.done()
        release.set()
        assert future.result(timeout=15)[0]["contents"] == '"town"\nplace 0'


def test_the_documentation_names_the_limits():
    text = (Path(__file__).parents[3] / "docs" / "retrieval.md").read_text()
    for name in ("MAX_TOPK", "MAX_QUERY_CHARS", "MAX_QUERIES", "MAX_DOCUMENTS"):
        assert str(getattr(retrieve_endpoint, name)) in text


def test_the_curl_examples_of_the_documentation_are_answered(client):
    text = (Path(__file__).parents[3] / "docs" / "retrieval.md").read_text()
    bodies = re.findall(r"-d '(\{.*\})'", text)
    assert len(bodies) == 2
    for body in bodies:
        found = client.post("/retrieve", content=body, headers={"Content-Type": CURLS_TYPE}).json()
        assert len(found["result"]) == 1
    paths = re.findall(r"^curl -s http://127\.0\.0\.1:8000(/\w+)$", text, re.MULTILINE)
    assert paths and all(client.get(path).status_code == 200 for path in paths)
