"""Other projects' clients and this server: the bytes that their code puts on the wire.

The requests were recorded from the clients themselves (requests 2.34.2), which were run against a socket:

    Search-R1 a14dc3a   search_r1/llm_agent/generation.py, _batch_search
                        search_r1/search/retrieval_request.py
    SkyRL a956457       skyrl-gym/skyrl_gym/tools/search.py, call_search_api
                        skyrl-agent/skyrl_agent/tools/local_search.py, _call_search_api
    verl b178a3c        verl/tools/utils/search_r1_like_utils.py, call_search_api
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_parts import DOCUMENTS, http, post

HEAD = (
    b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: python-requests/2.34.2\r\n"
    b"Accept-Encoding: gzip, deflate\r\n"
)
JSON_ONLY = b"Accept: application/json\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
RECORDED = {
    "Search-R1": HEAD + b"Accept: */*\r\nConnection: keep-alive\r\nContent-Length: 78\r\n"
    b"Content-Type: application/json\r\n\r\n"
    b'{"queries": ["director Tomas", "t\\u00f6wn"], "topk": 3, "return_scores": true}',
    "SkyRL": HEAD + JSON_ONLY + b"Content-Length: 78\r\n\r\n"
    b'{"query": "t\\u00f6wn \\u2026 director Tomas", "topk": 3, "return_scores": true}',
    "SkyRL's agent": HEAD + JSON_ONLY + b"Content-Length: 65\r\n\r\n"
    b'{"queries": ["director Tomas"], "topk": 3, "return_scores": true}',
    "verl": HEAD + JSON_ONLY + b"Content-Length: 78\r\n\r\n"
    b'{"queries": ["director Tomas", "t\\u00f6wn"], "topk": 3, "return_scores": true}',
}
FIRST = str(DOCUMENTS[1]["contents"])
SECOND = str(DOCUMENTS[0]["contents"])


@pytest.fixture(scope="module")
def address(serve_documents) -> Iterator[str]:
    with serve_documents(DOCUMENTS) as address:
        yield address


def exchange(address: str, request: bytes, in_two: bool = False) -> Any:
    """Sends the bytes, head and body apart with `in_two`, as requests does, and reads the reply's JSON."""
    split = urlsplit(address)
    head, body = request.split(b"\r\n\r\n", 1)
    pieces = [head + b"\r\n\r\n", body] if in_two else [request]
    with socket.create_connection((split.hostname, split.port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        response = HTTPResponse(connection, method="POST")
        response.begin()
        assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
        return json.loads(response.read())


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("client", RECORDED)
def test_what_other_projects_clients_send_gets_a_list_of_documents_for_each_query(address, client, in_two):
    request = RECORDED[client]
    fields = json.loads(request.split(b"\r\n\r\n", 1)[1])
    result = exchange(address, request, in_two)["result"]
    assert len(result) == len(fields.get("queries", ["one"]))
    # All of them read the text of each document from these places, and only that.
    assert [item["document"]["contents"] for item in result[0]] == [FIRST, SECOND]
    for item in result[0]:
        assert set(item) == {"document", "score"} and isinstance(item["score"], float)


def test_search_r1s_example_client_may_ask_for_more_documents_than_there_are(address):
    body = {"queries": ["director Tomas", "nothing of it"] * 200, "topk": 5, "return_scores": True}
    with http(address) as client:
        result = post(client, body).json()["result"]
    assert [len(documents) for documents in result] == [2, 0] * 200


def test_a_client_of_search_r1s_reranking_server_says_topk_in_its_own_words(address):
    """SearchRequest of Search-R1's search_r1/search/retrieval_rerank_server.py."""
    fields = {"queries": ["director Tomas"], "topk_retrieval": 10, "topk_rerank": 1, "return_scores": True}
    with http(address) as client:
        [documents] = post(client, fields).json()["result"]
    assert [item["document"]["contents"] for item in documents] == [FIRST]


@pytest.mark.parametrize("query", [7, None, ["x"], {}])
def test_a_single_query_must_be_text(address, query):
    with http(address) as client:
        response = post(client, {"query": query})
    assert response.status_code == 422 and '"query": string' in response.json()["detail"]


def test_half_a_surrogate_pair_in_a_single_query_is_searched_for(address):
    with http(address) as client:
        response = client.post("/retrieve", content=b'{"query": "director \\ud83d"}')
    assert [document["id"] for document in response.json()["result"][0]] == ["b"]
