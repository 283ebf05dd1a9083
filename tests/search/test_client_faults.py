"""The search client and servers that fail: nothing is lost or answered wrongly, nothing takes for ever."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from client_servers import Answer, RawServer, find, text_of

from search_r1.search.client import SearchClient, SearchError

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # deadlines of half a second

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


def test_a_request_that_began_just_before_the_deadline_says_the_reason_before_it(start):
    """Not "no answer for 0.0 s"."""

    def refuse_and_hang(body: object) -> Answer:
        if len(server.requests) > 1:
            time.sleep(0.5)
        return 503, {"detail": "it is full"}, {"Retry-After": "0.5"}

    server = start(refuse_and_hang)
    with (
        SearchClient(server.url, timeout=0.7) as client,  # the second request begins 0.15 to 0.2 s before
        pytest.raises(SearchError) as error,
    ):
        client.batch_search(["x"])
    assert len(server.requests) == 2
    assert "answered 503: it is full" in str(error.value) and "no answer for" not in str(error.value)


def test_a_dead_address_is_named_with_the_reason():
    with (
        SearchClient("http://127.0.0.1:1, http://127.0.0.1:2", timeout=0.5) as client,
        pytest.raises(
            SearchError, match="no connection within 0.5 s .*:1/retrieve: refused the connection; .*:2/retr"
        ),
    ):
        client.batch_search(["x"])


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


def test_a_full_server_leaves_the_work_to_another_one(start):
    full = start(lambda body: (503, {"detail": "full"}, {"Retry-After": "5"}))
    free = start(find)
    begin = time.monotonic()
    with SearchClient([full.url, free.url], cache_size=0) as client:
        for _ in range(10):
            assert ask(client) == right()
    assert time.monotonic() - begin < 3
    assert len(full.requests) == 1


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


@pytest.mark.parametrize("bad_server", ["resets", "speaks no HTTP", "drips", "never ends"], indirect=True)
def test_alone_a_bad_address_ends_in_an_error_that_names_it(bad_server):
    begin = time.monotonic()
    with SearchClient(bad_server.url, timeout=0.4) as client:
        with pytest.raises(SearchError) as error:
            ask(client)
        assert time.monotonic() - begin < 2
        assert bad_server.url in str(error.value) and "\n" not in str(error.value)
