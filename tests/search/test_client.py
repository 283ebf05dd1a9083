"""The search client against a small HTTP server whose answers a test decides."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from client_servers import Answer, find, text_of

from search_r1.search.client import SearchClient, SearchError, parse_urls
from search_r1.search.replies import parse_document, parse_reply


def test_documents_come_back_in_the_order_of_the_queries(start):
    server = start(find)
    with SearchClient(server.url, topk=2) as client:
        result = client.batch_search(["b", "a", "c"])
    assert result == [[{"contents": text_of(query), "score": 1.5}] for query in "bac"]
    assert server.requests == [{"queries": ["b", "a", "c"], "topk": 2, "return_scores": True}]


def test_equal_queries_are_sent_once(start):
    server = start(find)
    with SearchClient(server.url) as client:
        result = client.batch_search(["x", "y", "x"])
    assert server.requests[0]["queries"] == ["x", "y"]
    assert result[0] == result[2] != result[1]


def test_an_answer_is_asked_for_once(start):
    server = start(find)
    with SearchClient(server.url) as client:
        assert client.batch_search(["x"]) == client.batch_search(["x"])
        client.batch_search(["x"], topk=7)
    assert [request["topk"] for request in server.requests] == [3, 7]


def test_queries_that_wait_while_requests_are_out_go_together(start):
    release = threading.Event()

    def slow_first(body: dict) -> Answer:
        if body["queries"][0].startswith("early"):
            release.wait(10)
        return find(body)

    server = start(slow_first)
    with SearchClient(server.url) as client:
        early = [client.submit([f"early {i}"])[0] for i in range(2)]  # one for each slot
        while len(server.requests) < 2:
            time.sleep(0.002)
        late = [client.submit([f"late {i}"])[0] for i in range(5)]
        release.set()
        for future in early + late:
            future.result(timeout=10)
    late_requests = [request["queries"] for request in server.requests[2:]]
    assert sum(late_requests, []) == [f"late {i}" for i in range(5)]
    assert len(late_requests) <= 2


def test_a_lone_surrogate_can_be_asked_for(start):
    server = start(find)
    with SearchClient(server.url) as client:
        assert client.batch_search(["x\ud800y"])[0]
    assert server.requests[0]["queries"] == ["x?y"]


def test_equal_queries_under_way_share_one_search_and_keep_their_own_deadlines(start):
    release = threading.Event()
    server = start(lambda body: (release.wait(10), find(body))[1])
    with SearchClient(server.url, timeout=0.6) as client:
        early = client.submit(["x"])[0]
        time.sleep(0.4)
        late = client.submit(["x"])[0]
        with pytest.raises(SearchError, match="no answer within 0.6 s"):
            early.result(timeout=5)
        release.set()
        assert late.result(timeout=5)[0]["contents"] == text_of("x")
        assert client.statistics()["shared"] == 1


def test_many_threads_get_each_their_own_answer(start):
    server = start(find)
    wrong = []
    with SearchClient(server.url, cache_size=20) as client:

        def ask(thread: int) -> None:
            for number in range(12):
                query = f"{(thread * 7 + number) % 70}"
                if client.batch_search([query])[0][0]["contents"] != text_of(query):
                    wrong.append(query)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.statistics()["searches"] == 96
    assert not wrong


def test_waiting_queries_are_dealt_out_over_the_addresses(start):
    servers = [start(find), start(find)]
    with SearchClient([server.url for server in servers]) as client:
        client.batch_search([str(i) for i in range(400)])
    assert [max(map(len, server.queries)) for server in servers] == [200, 200]


def test_proxies_of_the_environment_are_used_only_if_told(start, monkeypatch):
    server = start(find)
    proxy = start(find)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with SearchClient(server.url) as client:
        assert client.batch_search(["x"])[0]
    assert (len(server.requests), len(proxy.requests)) == (1, 0)
    with SearchClient(server.url, use_proxy=True) as client:
        assert client.batch_search(["x"])[0]
    assert (len(server.requests), len(proxy.requests)) == (1, 1)


def test_the_api_key_is_sent_as_a_bearer_token_and_is_in_no_message(start, monkeypatch):
    server = start(lambda body: (401, {"detail": "no"}))
    monkeypatch.setenv("SEARCH_R1_API_KEY", "geheim\n")
    with SearchClient(server.url) as client, pytest.raises(SearchError) as error:
        client.batch_search(["x"])
    assert server.headers[0]["Authorization"] == "Bearer geheim"
    assert "geheim" not in str(error.value)
    with SearchClient(server.url, api_key="other") as client, pytest.raises(SearchError):
        client.batch_search(["x"])
    assert server.headers[1]["Authorization"] == "Bearer other"
    with SearchClient(server.url, api_key="") as client, pytest.raises(SearchError):
        client.batch_search(["x"])
    assert "Authorization" not in server.headers[2]
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        SearchClient(server.url, api_key="geheim\x00\n2")
    assert "geheim" not in str(refused.value)


def test_what_waits_when_the_client_is_closed_fails_at_once(start):
    release = threading.Event()
    server = start(lambda body: (release.wait(10), find(body))[1])
    client = SearchClient(server.url, timeout=60)
    future = client.submit(["x"])[0]
    while not server.requests:
        time.sleep(0.002)
    begin = time.monotonic()
    client.close()
    assert time.monotonic() - begin < 0.5
    release.set()
    with pytest.raises(SearchError, match="closed"):
        future.result(timeout=1)
    with pytest.raises(RuntimeError, match="closed"):
        client.submit(["y"])
    client.close()
    assert not any(thread.name == "search-client" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "reply, message",
    [
        (b'{"result": []}', "0 lists for 1 queries"),
        (b'{"result": [[], []]}', "2 lists for 1 queries"),
        (b'{"results": [[]]}', "no 'result' list"),
        (b"[[]]", "no 'result' list"),
        (b'{"result": [{"document": {}}]}', "no 'result' list"),
        (b"<html>hello", "not JSON; it begins with '<html>hello'"),
        (b"", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_reply_of_another_shape_is_an_error_that_names_it(reply, message):
    with pytest.raises(SearchError, match=message):
        parse_reply(reply, 1)


@pytest.mark.parametrize(
    "item, score",
    [
        ({"document": {"contents": "t", "id": 3}, "score": 2}, 2.0),
        ({"document": {"contents": "t"}}, None),
        ({"document": "t", "score": 0.5}, 0.5),
        ({"contents": "t"}, None),
        ("t", None),
        ({"document": {"contents": "t"}, "score": None}, None),
    ],
)
def test_the_documents_of_all_search_r1_servers_are_read(item, score):
    assert parse_document(item) == {"contents": "t", "score": score}


@pytest.mark.parametrize("urls", ["", " , ", "127.0.0.1:8000", "ftp://a/retrieve", []])
def test_an_address_that_is_none_is_refused(urls):
    with pytest.raises(ValueError, match="retriever url"):
        parse_urls(urls)


@pytest.mark.parametrize("wrong", [{"topk": 0}, {"timeout": 0.0}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match="found 0"):
        SearchClient("http://a", **wrong)


def test_a_search_error_can_cross_processes():
    assert str(pickle.loads(pickle.dumps(SearchError("it is dead")))) == "it is dead"
