"""Our client and other projects' servers, by what their code answered when it was run.

The replies were recorded from the servers' own FastAPI applications (FastAPI 0.165), each with a retriever
made for that in place of its index:

    SkyRL a956457       examples/train/search/retriever/retrieval_server.py
    verl b178a3c        examples/sglang_multiturn/search_r1_like/local_dense_retriever/retrieval_server.py
    Search-R1 a14dc3a   search_r1/search/retrieval_server.py
"""

from __future__ import annotations

import json

import pytest
from client_servers import Answer, find, text_of

from search_r1.search.client import SearchClient, SearchError


def skyrl(body: dict) -> Answer:
    """SkyRL's server: `query` must be there, fields that it does not know are ignored."""
    if not isinstance(body.get("query"), str):
        missing = {"type": "missing", "loc": ["body", "query"], "msg": "Field required", "input": body}
        return 422, {"detail": [missing]}
    document = {"document": {"id": "0", "contents": text_of(body["query"])}, "score": 1.0}
    return 200, {"result": [[document]]}


def search_r1(body: dict) -> Answer:
    """Search-R1's server, and verl's copy of it: `queries` must be there."""
    if not isinstance(body.get("queries"), list):
        missing = {"type": "missing", "loc": ["body", "queries"], "msg": "Field required", "input": body}
        return 422, {"detail": [missing]}
    return find(body)


def texts(client: SearchClient, queries: list[str]) -> list[str]:
    return [documents[0]["contents"] for documents in client.batch_search(queries)]


QUERIES = [f"query {number}" for number in range(40)]
RIGHT = [text_of(query) for query in QUERIES]


def test_a_server_that_takes_one_query_a_request_gets_one_and_answers_all(start):
    server = start(skyrl)
    with SearchClient(server.url, cache_size=0) as client:
        assert texts(client, QUERIES) == RIGHT
        assert texts(client, QUERIES[:3]) == RIGHT[:3]
        assert client.statistics()["failed"] == client.statistics()["failed_requests"] == 0
    refused = [body for body in server.requests if "query" not in body]
    assert len(refused) <= 2  # what was under way before the first answer
    single = [body for body in server.requests if "query" in body]
    assert all(body["topk"] == 3 and body["return_scores"] is True for body in single)


def test_a_server_of_each_kind_share_the_work(start):
    one = start(skyrl)
    many = start(search_r1)
    with SearchClient([one.url, many.url], cache_size=0) as client:
        for _ in range(3):
            assert texts(client, QUERIES) == RIGHT
    assert one.requests and many.requests


def test_another_server_at_the_same_address_is_understood(start):
    server = start(skyrl)
    with SearchClient(server.url, cache_size=0) as client:
        assert texts(client, QUERIES[:2]) == RIGHT[:2]
        server.answer = search_r1
        assert texts(client, QUERIES) == RIGHT
        server.answer = skyrl
        assert texts(client, QUERIES) == RIGHT


def test_a_server_that_wants_other_fields_is_an_error_that_says_what_it_said(start):
    server = start(lambda body: (422, {"detail": [{"loc": ["body", "text"], "msg": "Field required"}]}))
    with SearchClient(server.url) as client, pytest.raises(SearchError, match="422.*Field required"):
        client.batch_search(["x"])


@pytest.mark.parametrize(
    "contents, read",
    [("half \ud83d a pair", "half ? a pair"), ("\udc00", "?"), ("a\x00b\u2028c", "a\x00b\u2028c")],
)
def test_half_a_surrogate_pair_in_a_document_is_replaced(start, contents, read):
    """json.dumps of any server writes such a half as an escape; no file and no tokenizer takes it."""
    server = start(lambda body: (200, {"result": [[{"document": {"contents": contents}, "score": 1}]]}))
    with SearchClient(server.url) as client:
        [[document]] = client.batch_search(["x"])
    assert document == {"contents": read, "score": 1.0}
    document["contents"].encode()


REPLIES = {
    "a huge score": (200, json.dumps({"result": [[{"document": {"contents": "t"}, "score": 10**400}]]})),
    "no finite score": (200, '{"result": [[{"document": {"contents": "t"}, "score": Infinity}]]}'),
    "half a pair in an error": (400, '{"detail": "bad \\ud83d query"}'),
    "half a pair in a field name": (200, '{"result": [[{"document": {"\\ud83d": "t"}}]]}'),
    "half a pair in a status line's detail": (422, '{"detail": [{"loc": ["\\ud83d"], "msg": "\\ud83d"}]}'),
    "a loc that is no list": (422, '{"detail": [{"loc": 7}]}'),
    "a number of many digits": (200, '{"result": ' + "9" * 5000 + "}"),
    "a deep reply": (200, "[" * 100_000),
    "a deep refusal": (422, "[" * 100_000),
    "a refusal whose detail is a number": (422, '{"detail": 7}'),
}


@pytest.mark.parametrize("name", REPLIES)
def test_nothing_that_a_server_sends_ends_more_than_its_search(start, name):
    status, raw = REPLIES[name]
    server = start(lambda body: find(body) if body["queries"] == ["good"] else (status, raw))
    with SearchClient(server.url, timeout=60) as client:
        [future] = client.submit(["strange"])
        error = future.exception(timeout=5)  # by what the server said, not by the deadline
        if error is None:
            [document] = future.result()
            document["contents"].encode()
        else:
            assert isinstance(error, SearchError)
            str(error).encode()
        assert texts(client, ["good"]) == [text_of("good")]
