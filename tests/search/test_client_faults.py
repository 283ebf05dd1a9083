"""The search client and servers that fail: nothing is lost or answered wrongly, nothing takes for ever."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from client_servers import Answer, RawServer, find, text_of

from search_r1.search.client import SearchClient, SearchError
from search_r1.search.transport import addresses, dispatch

pytestmark = pytest.mark.slow  # deadlines of half a second: not beside other tests

QUERIES = [str(number) for number in range(40)]


def ask(client: SearchClient, queries: list[str] = QUERIES) -> list[str]:
    return [documents[0]["contents"] for documents in client.batch_search(queries)]


def right(queries: list[str] = QUERIES) -> list[str]:
    return [text_of(query) for query in queries]


# ---- one address


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again(start, status):
    answers = [(status, {"detail": "busy"}), (status, "no json"), None]
    server = start(lambda body: answers.pop(0) or find(body))
    with SearchClient(server.url) as client:
        assert ask(client, ["x"]) == right(["x"])
        assert client.statistics()["failed_requests"] == 2
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 304])
def test_a_refused_request_is_not_tried_again_and_says_what_the_server_said(start, status):
    server = start(lambda body: (status, {"detail": "topk: found 0"}))
    said = f"answered {status}: " + ("no text" if status == 304 else "topk: found 0")
    with SearchClient(server.url) as client, pytest.raises(SearchError, match=said):
        client.batch_search(["x"])
    assert len(server.requests) == 1


def test_a_key_that_is_refused_costs_one_request_however_many_queries(start):
    server = start(lambda body: (401, {"detail": "who are you?"}))
    with SearchClient(server.url) as client:
        errors = [future.exception(timeout=5) for future in client.submit(QUERIES)]
    assert {str(error) for error in errors} == {f"{server.url} answered 401: who are you?"}
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_only_the_query_that_is_refused_fails(start, status):
    def picky(body: dict) -> Answer:
        return (status, {"detail": "bad"}) if "13" in body["queries"] else find(body)

    server = start(picky)
    with SearchClient(server.url) as client:
        futures = client.submit(QUERIES)
        outcomes = [future.exception(timeout=5) or future.result() for future in futures]
    assert str(outcomes.pop(13)) == f"{server.url} answered {status}: bad"
    assert [documents[0]["contents"] for documents in outcomes] == right(QUERIES[:13] + QUERIES[14:])
    assert len(server.requests) < 20


@pytest.mark.parametrize("breaks", ["500", "connection"])
def test_a_query_that_breaks_its_request_fails_alone_and_holds_nobody_up(start, breaks):
    def fragile(body: dict) -> Answer:
        if "13" in body["queries"]:
            if breaks == "connection":
                raise ConnectionAbortedError  # no answer at all, as from a process that died
            return 500, {"detail": "oh no"}
        return find(body)

    server = start(fragile)
    with SearchClient(server.url, timeout=1.5) as client:
        begin = time.monotonic()
        futures = client.submit(QUERIES)
        others = [future.result(timeout=3) for future in futures[:13] + futures[14:]]
        assert time.monotonic() - begin < 1.4
        assert [documents[0]["contents"] for documents in others] == right(QUERIES[:13] + QUERIES[14:])
        assert ask(client, ["later"]) == right(["later"])
        with pytest.raises(SearchError, match="no answer within 1.5 s .*(500: oh no|isconnected|reset)"):
            futures[13].result()


def test_a_search_fails_at_its_deadline_with_the_reason(start):
    server = start(lambda body: (500, {"detail": "out of memory"}))
    begin = time.monotonic()
    with (
        SearchClient(server.url, timeout=0.5) as client,
        pytest.raises(SearchError, match="0.5 s.*answered 500: out of memory"),
    ):
        client.batch_search(["x"])
    assert 0.4 < time.monotonic() - begin < 2
    assert len(server.requests) >= 2


def test_a_dead_address_is_named_with_the_reason():
    with (
        SearchClient("http://127.0.0.1:1, http://127.0.0.1:2", timeout=0.5) as client,
        pytest.raises(
            SearchError, match="no connection within 0.5 s .*:1/retrieve: refused the connection; .*:2/retr"
        ),
    ):
        client.batch_search(["x"])


def test_a_host_that_has_no_address_is_an_error_that_names_it():
    with (
        SearchClient("http://no-such-host.invalid", timeout=0.5) as client,
        pytest.raises(
            SearchError, match="no connection .*http://no-such-host.invalid/retrieve: the host name "
        ),
    ):
        client.batch_search(["x"])


def test_a_server_that_hangs_does_not_hold_the_client_longer_than_the_deadline(start):
    release = threading.Event()
    server = start(lambda body: (release.wait(10), find(body))[1])
    begin = time.monotonic()
    with SearchClient(server.url, timeout=0.6) as client:
        with pytest.raises(SearchError, match=r"no answer within 0.6 s .*: no answer for 0.6 s"):
            client.batch_search(["x"])
        assert time.monotonic() - begin < 2
    release.set()


def test_a_request_that_nobody_waits_for_any_more_is_given_up():
    hung_up = threading.Event()

    def wait_for_the_end(connection: socket.socket) -> None:
        try:
            while connection.recv(1000):
                pass
        finally:
            hung_up.set()

    server = RawServer(wait_for_the_end)
    try:
        with SearchClient(server.url, timeout=0.3) as client:
            with pytest.raises(SearchError):
                ask(client, ["x"])
            assert hung_up.wait(2)
    finally:
        server.stop()


def test_a_connection_that_was_lost_on_the_way_is_replaced_before_the_deadline(start):
    first = threading.Event()

    def lost_once(body: dict) -> Answer:
        if not first.is_set():
            first.set()
            time.sleep(5)
        return find(body)

    server = start(lost_once)
    begin = time.monotonic()
    with SearchClient(server.url, timeout=2) as client:
        assert ask(client, ["x"]) == right(["x"])
        assert time.monotonic() - begin < 1.8


def test_a_long_outage_is_waited_for_once_and_its_end_is_noticed(start, monkeypatch):
    monkeypatch.setattr(dispatch, "LAST_TRY", 0.3)
    monkeypatch.setattr(addresses, "MAX_PAUSE", 0.2)
    is_back = threading.Event()
    server = start(lambda body: find(body) if is_back.is_set() else (503, {"detail": "away"}))
    with SearchClient(server.url, timeout=0.8) as client:
        with pytest.raises(SearchError, match="within 0.8 s"):
            ask(client, ["x"])
        with pytest.raises(SearchError, match="within 0.3 s"):
            ask(client, ["y"])
        is_back.set()
        time.sleep(0.3)
        assert ask(client) == right()
        is_back.clear()
        with pytest.raises(SearchError, match="within 0.8 s"):
            ask(client, ["z"])


def test_a_server_that_is_back_but_slow_at_first_is_noticed(start, monkeypatch):
    monkeypatch.setattr(dispatch, "LAST_TRY", 0.1)
    is_back = threading.Event()

    def slow(body: dict) -> Answer:
        if not is_back.is_set():
            return 503, {"detail": "away"}
        time.sleep(0.3)
        return find(body)

    server = start(slow)
    with SearchClient(server.url, timeout=0.8, cache_size=0) as client:
        with pytest.raises(SearchError, match="within 0.8 s"):
            ask(client, ["x"])
        is_back.set()
        deadline = time.monotonic() + 10
        while True:
            try:
                assert ask(client, ["y"]) == right(["y"])
                break
            except SearchError:
                assert time.monotonic() < deadline, "each search is given up before the server can answer"


def test_an_outage_shorter_than_the_deadline_is_not_noticed_by_anybody(start):
    begin = time.monotonic()
    server = start(lambda body: find(body) if time.monotonic() - begin > 1.0 else (502, ""))
    with SearchClient(server.url, timeout=20) as client:
        assert ask(client) == right()
    assert time.monotonic() - begin < 5


# ---- Retry-After


def test_retry_after_is_waited_for(start):
    answers = [(503, {"detail": "full"}, {"Retry-After": "1"}), None]
    server = start(lambda body: answers.pop(0) or find(body))
    with SearchClient(server.url) as client:
        assert ask(client, ["x"]) == right(["x"])
    assert 1.0 <= server.times[1] - server.times[0] < 1.6


def test_retry_after_does_not_outlast_the_deadline(start):
    server = start(lambda body: (503, {"detail": "full"}, {"Retry-After": "3600"}))
    begin = time.monotonic()
    with SearchClient(server.url, timeout=0.5) as client, pytest.raises(SearchError, match="503: full"):
        ask(client, ["x"])
    assert time.monotonic() - begin < 2
    assert len(server.requests) == 1


def test_a_full_server_leaves_the_work_to_another_one(start):
    full = start(lambda body: (503, {"detail": "full"}, {"Retry-After": "5"}))
    free = start(find)
    begin = time.monotonic()
    with SearchClient([full.url, free.url], cache_size=0) as client:
        for _ in range(10):
            assert ask(client) == right()
    assert time.monotonic() - begin < 3
    assert len(full.requests) == 1


def test_a_server_that_takes_few_queries_at_a_time_gets_few(start):
    server = start(lambda body: find(body) if len(body["queries"]) <= 10 else (503, {"detail": "full"}))
    with SearchClient(server.url, timeout=10) as client:
        assert ask(client) == right()


# ---- garbage


@pytest.mark.parametrize(
    "reply, message",
    [
        ("<html>Welcome to nginx</html>", "not JSON; it begins with '<html>Welcome"),
        ({"result": []}, "0 lists for 1 queries"),
        ({"result": [[{"document": {"text": "x"}}]]}, "without 'contents'"),
        ({"hits": []}, "no 'result' list of lists: is this /retrieve"),
    ],
)
def test_garbage_from_the_only_address_is_an_error_at_once(start, reply, message):
    server = start(lambda body: (200, reply))
    begin = time.monotonic()
    with SearchClient(server.url) as client, pytest.raises(SearchError, match=message) as error:
        ask(client, ["x"])
    assert time.monotonic() - begin < 2 and server.url in str(error.value)


def test_a_malformed_document_fails_its_own_query_only(start):
    def spoil(body: dict) -> Answer:
        status, reply = find(body)
        for documents, query in zip(reply["result"], body["queries"], strict=True):
            if query == "13":
                documents[0] = {"document": {"title": "no text"}}
        return status, reply

    server = start(spoil)
    with SearchClient(server.url) as client:
        futures = client.submit(QUERIES)
        errors = [future.exception(timeout=5) for future in futures]
    assert [error is None for error in errors] == [query != "13" for query in QUERIES]
    assert "found fields ['title']" in str(errors[13])


def test_garbage_from_all_addresses_is_an_error_before_the_deadline(start):
    servers = [start(lambda body: (200, "?")), start(lambda body: (200, {"result": 7}))]
    begin = time.monotonic()
    with SearchClient([server.url for server in servers]) as client, pytest.raises(SearchError):
        ask(client, ["x"])
    assert time.monotonic() - begin < 2


# ---- one bad address of two

REPLY = json.dumps({"result": [[{"document": {"contents": "wrong"}, "score": 1.0}]] * 40}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(REPLY)


def _send(*parts: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return behave


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _drip(connection: socket.socket) -> None:
    connection.sendall(HEAD + LENGTH)
    for byte in REPLY:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def _never_end(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(b" " * 1000)
        time.sleep(0.01)


FAULTS: dict[str, Callable[[socket.socket], None]] = {
    "closes without a word": _send(),
    "resets": _reset,
    "says nothing": lambda connection: time.sleep(20),
    "speaks no HTTP": _send(b"220 mail.example ESMTP\r\n"),
    "sends bytes of all kinds": _send(bytes(range(256)) * 20),
    "sends half a head": _send(b"HTTP/1.1 200 O"),
    "sends half a reply": _send(HEAD + LENGTH + REPLY[:300]),
    "sends half a reply without its length": _send(HEAD + b"\r\n" + REPLY[:300]),
    "sends a broken chunk": _send(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + REPLY),
    "sends no real gzip": _send(HEAD + b"Content-Encoding: gzip\r\n" + LENGTH + REPLY),
    "drips": _drip,
    "never ends": _never_end,
    "redirects to itself": _send(b"HTTP/1.1 307 T\r\nLocation: /retrieve\r\nContent-Length: 0\r\n\r\n"),
    "redirects to nowhere": _send(b"HTTP/1.1 307 T\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n"),
    "answers for too many queries": _send(HEAD + b'\r\n{"result": [' + b"[]," * len(QUERIES) + b"[]]}"),
    "sends a web page": _send(HEAD + b"\r\n<html></html>"),
}


@pytest.fixture(params=FAULTS, ids=lambda name: name.replace(" ", "-"))
def bad_server(request) -> Iterator[RawServer]:
    server = RawServer(FAULTS[request.param])
    yield server
    server.stop()


def test_another_address_answers_what_a_bad_one_does_not(bad_server, start):
    good = start(find)
    begin = time.monotonic()
    with SearchClient([bad_server.url, good.url], timeout=3, cache_size=0) as client:
        for _ in range(3):
            assert ask(client) == right()
    assert time.monotonic() - begin < 3
    assert bad_server.num_connections > 0


def test_alone_a_bad_address_ends_in_an_error_that_names_it(bad_server):
    begin = time.monotonic()
    with SearchClient(bad_server.url, timeout=0.4) as client:
        with pytest.raises(SearchError) as error:
            ask(client)
        assert time.monotonic() - begin < 2
        assert bad_server.url in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_an_address_that_answers_500_is_left_alone_but_for_a_look_now_and_then(start):
    bad, good = start(lambda body: (500, "")), start(find)
    with SearchClient([bad.url, good.url], cache_size=0) as client:
        end = time.monotonic() + 1.5
        rounds = 0
        while time.monotonic() < end:
            assert ask(client) == right()
            rounds += 1
    assert rounds > 5 and 3 <= len(bad.requests) <= 15
    assert all(len(queries) == 1 for queries in bad.queries[1:])  # a look costs one query, sent twice


@pytest.mark.slow
def test_an_address_that_comes_back_gets_its_share_again(start):
    is_back = threading.Event()
    flaky = start(lambda body: find(body) if is_back.is_set() else (503, ""))
    steady = start(find)
    with SearchClient([flaky.url, steady.url], cache_size=0) as client:
        for _ in range(30):
            ask(client)
        is_back.set()
        begin = time.monotonic()
        while max(map(len, flaky.queries[-1:])) < 20:
            assert ask(client) == right()
            assert time.monotonic() - begin < 3
        client.batch_search([f"more {i}" for i in range(400)])
    assert max(map(len, flaky.queries)) == 200


def test_a_slow_server_is_helped_and_what_it_says_later_does_no_harm(start):
    slow, fast = start(lambda body: (time.sleep(1.0), find(body))[1]), start(find)
    with SearchClient([slow.url, fast.url], timeout=1.2, cache_size=0) as client:
        for _ in range(6):
            begin = time.monotonic()
            assert ask(client) == right()
            assert time.monotonic() - begin < 0.9
        assert client.statistics()["failovers"] > 0
        assert client.statistics()["failed"] == 0


def test_a_server_that_closes_idle_connections_is_not_taken_for_a_bad_one():
    def answer_once(connection: socket.socket) -> None:
        body = json.dumps({"result": [["t"]]}).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.05)

    server = RawServer(answer_once)
    try:
        with SearchClient(server.url, cache_size=0, timeout=5) as client:
            for _ in range(5):
                assert client.batch_search(["x"])[0][0]["contents"] == "t"
                time.sleep(0.1)
    finally:
        server.stop()
