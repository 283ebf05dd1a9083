"""The HTTP surface under made-up requests: no 500, no hang, replies as the schema says."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_parts import echo_service, http, post

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def address(serve) -> Iterator[str]:
    with serve(echo_service()) as address:
        yield address


@pytest.fixture(scope="module")
def client(address) -> Iterator[httpx.Client]:
    with http(address) as client:
        yield client


def exchange(address: str, raw: bytes) -> bytes:
    """Sends bytes, says that no more come, and reads until the server closes. Fails if it does not."""
    split = urlsplit(address)
    with socket.create_connection((split.hostname, split.port), timeout=10) as connection:
        reply = b""
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(2**16):
                reply += piece
        except ConnectionError:
            pass  # cut off in the middle, as it may be after nonsense
        return reply


CHECKS = {"checks": {"negative_data_rejection": {"expected-statuses": [400, 405, 413, 422]}}}
CASES = [
    ("/retrieve", "POST", "positive"),
    ("/retrieve", "POST", "negative"),
    ("/health", "GET", "positive"),
    ("/metrics", "GET", "positive"),
]


@pytest.mark.slow
@pytest.mark.parametrize("path, method, mode", CASES)
def test_requests_made_from_the_schema_get_replies_of_the_schema(address, path, method, mode):
    import schemathesis  # here, since its import takes seconds in each process of the tests
    from schemathesis.config import SchemathesisConfig

    config = SchemathesisConfig.from_dict(CHECKS)
    operation = schemathesis.openapi.from_url(f"{address}/openapi.json", config=config)[path][method]

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @settings(max_examples=100, parent=RELAXED)
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate()

    check()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "queries": JSON_VALUES | st.lists(st.text(st.characters(), max_size=20), max_size=5),
        "topk": JSON_VALUES | st.integers(-2, 1002),
        "return_scores": JSON_VALUES,
        "x": JSON_VALUES,
    },
)


@given(body=BODIES)
@settings(max_examples=200, parent=RELAXED)
@example(body={"queries": ["\ud800", "a\x00b", "\U0001f600"], "topk": 1})
@example(body={"queries": ["x"], "topk": 10**400})
@example(body={"queries": ["x"], "topk": float("nan")})
@example(body={"queries": ["x"], "return_scores": float("inf")})
def test_json_of_any_shape_is_answered_or_refused_with_a_reason(client, body):
    response = client.post("/retrieve", content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 413, 422)
    reply = response.json()
    if response.status_code == 200:
        assert len(reply["result"]) == len(body["queries"])
    else:
        assert isinstance(reply["detail"], str) and reply["detail"]


HEADS = st.sampled_from(
    [
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\n",
        b"POST /retrieve HTTP/1.0\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET /health HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n",
        b"POST /retrieve?x=1#y HTTP/1.1\r\n",
        b"POST http://x/retrieve HTTP/1.1\r\n",
        b"POST /%72etrieve HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]
)
LINES = st.sampled_from(
    [
        b"Content-Length: 5\r\n",
        b"Content-Length: 18\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Type: text/xml; charset=utf-16\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
        b"Expect: 100-continue\r\n",
        b"Authorization: \xff\xfe\r\n",
        b"X: " + b"y" * 5000 + b"\r\n",
        b"bad line\r\n",
    ]
)
TAILS = st.sampled_from(
    [b"", b"12345", b'{"queries": ["a"]}', b"5\r\n12345\r\n0\r\n\r\n", b"zz\r\n", b"\r\n\r\n"]
)


@given(
    head=HEADS | st.binary(max_size=50),
    lines=st.lists(LINES, max_size=3),
    tail=TAILS | st.binary(max_size=50),
)
@settings(max_examples=300, parent=RELAXED)
def test_any_bytes_on_the_socket_end_in_a_reply_or_a_closed_connection(address, client, head, lines, tail):
    reply = exchange(address, head + b"".join(lines) + b"\r\n" + tail)
    assert b"HTTP/1.1 500" not in reply
    assert reply == b"" or reply.startswith(b"HTTP/1.1 ")
    assert post(client, {"queries": ["still here"]}).status_code == 200
