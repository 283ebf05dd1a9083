"""What each server checks: heads and bodies in time and within bounds, hosts, origins, types and keys."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from verl.utils import serving
from verl.utils.serving import SERVER_OPTIONS, Door, DoorRules, is_own_name

JSON = {"Content-Type": "application/json"}


async def count_bytes(scope, receive, send):
    """Answer with the number of bytes of the body, after a moment if they are b"wait"."""
    message = await receive()
    if message["type"] == "http.disconnect":
        return
    assert not message["more_body"]
    if message["body"] == b"wait":
        await asyncio.sleep(2)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(message["body"])})


@contextmanager
def door(**rules):
    made = Door(count_bytes, DoorRules(**rules))
    options = SERVER_OPTIONS | {"log_level": "error", "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(made, **options))
    server.config.timeout_graceful_shutdown = 1
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        address = listener.getsockname()
        with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", trust_env=False, timeout=20) as client:
            yield made, client, address
    finally:
        server.should_exit = True
        thread.join(20)


def wait_until(holds, seconds=20):
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def read_to_end(connection):
    return b"".join(iter(lambda: connection.recv(2**16), b""))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "10.1.2.3"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain; application/json"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_web_page_of_others_may_not_ask(headers, status):
    with door() as (_, client, _):
        reply = client.post("/", content=b"{}", headers=JSON | headers)
        assert reply.status_code == status, reply.text
        if status != 200:
            assert reply.json()["detail"]
        assert client.post("/", content=b"{}", headers=JSON).text == "2"


def test_a_body_without_a_type_is_refused_and_an_empty_one_needs_none():
    with door() as (_, client, _):
        assert client.post("/", content=b"{}").status_code == 415
        assert client.post("/").status_code == 200
        assert client.post("/", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    with door(needs_json=False) as (_, client, _):
        assert client.post("/", content=b"{}").status_code == 200


def test_a_server_that_others_reach_has_names_that_it_does_not_know():
    with door(host="0.0.0.0") as (_, client, _):
        assert client.get("/", headers={"Host": "node17:8000"}).status_code == 200
    assert is_own_name(socket.gethostname()) and not is_own_name("")


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ([], False),
        ([("Authorization", "Bearer k\u00e9y")], True),
        ([("authorization", "bearer k\u00e9y")], True),
        ([("Authorization", "BEARER   k\u00e9y")], True),
        ([("X-API-Key", "k\u00e9y")], True),
        ([("Authorization", "Bearer wrong")], False),
        ([("Authorization", "k\u00e9y")], False),
        ([("Authorization", "Basic k\u00e9y")], False),
        ([("Authorization", "Bearer wrong"), ("Authorization", "Bearer k\u00e9y")], False),
        ([("Authorization", "Bearer k\u00e9y"), ("Authorization", "Bearer wrong")], False),
        ([("Authorization", "Bearer k\u00e9y"), ("Authorization", "Bearer k\u00e9y")], False),
        ([("X-API-Key", "k\u00e9y"), ("X-API-Key", "wrong")], False),
    ],
)
def test_a_key_is_given_once(headers, allowed):
    raw = [(name.encode(), value.encode()) for name, value in headers]
    with door(key="k\u00e9y") as (_, client, _):
        reply = client.get("/", headers=raw)
        assert reply.status_code == (200 if allowed else 401)
        assert client.get("/health").status_code == 200
        # Whoever has the key is no web page of others.
        assert client.get("/", headers=[*raw, (b"Host", b"a.example")]).status_code == (
            200 if allowed else 401
        )


def test_half_heads_and_endless_heads_end_their_connections(monkeypatch):
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.5)
    with door() as (_, client, address):
        half = [socket.create_connection(address, timeout=20) for _ in range(40)]
        for index, connection in enumerate(half):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "[: index + 1])
        assert client.get("/").status_code == 200
        assert {read_to_end(connection) for connection in half} == {b""}
        kept = socket.create_connection(address, timeout=20)
        kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET / HTTP/1.1\r\n")
        assert read_to_end(kept) in (b"", b"0")
        slow = client.post("/", content=b"wait", headers=JSON)  # an answer may take longer than a head
        assert slow.text == "4"
        monkeypatch.setattr(serving, "HEAD_SECONDS", 20)
        endless = socket.create_connection(address, timeout=20)
        reply = b""
        try:
            for _ in range(200):
                endless.sendall(b"X: " + b"y" * 4000 if reply else b"GET / HTTP/1.1\r\nX: " + b"y" * 4000)
            reply = read_to_end(endless)
        except OSError:
            pass
        else:
            assert reply.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        for connection in (*half, kept, endless):
            connection.close()


def head(length):
    return (
        f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_half_sent_bodies_are_bounded_in_sum_and_time(monkeypatch):
    monkeypatch.setattr(serving, "MAX_OPEN_BYTES", 300_000)
    monkeypatch.setattr(serving, "BODY_SECONDS", 1.5)
    with door() as (made, client, address):
        connections = [socket.create_connection(address, timeout=20) for _ in range(12)]
        for connection in connections:
            connection.sendall(head(60_000_000) + b" " * 60_000)
        wait_until(lambda: made.open_bytes > 200_000)
        assert made.open_bytes <= 300_000
        replies = [read_to_end(connection) for connection in connections]
        statuses = {reply.split()[1] for reply in replies if reply}
        assert statuses <= {b"408", b"503"} and b"408" in statuses
        wait_until(lambda: made.open_bytes == 0)
        assert client.post("/", content=b" " * 200_000, headers=JSON).text == "200000"
        assert made.open_bytes == 0
        for connection in connections:
            connection.close()


def test_a_body_that_is_too_large_is_refused_by_its_header_and_while_it_arrives(monkeypatch):
    monkeypatch.setattr(serving, "MAX_BODY_BYTES", 1000)
    with door() as (made, client, _):
        for content in (b"x" * 2000, iter([b"x" * 600] * 3)):
            reply = client.post("/", content=content, headers=JSON)
            assert (reply.status_code, "1000 bytes" in reply.json()["detail"]) == (413, True)
        assert client.post("/", content=b"x" * 1000, headers=JSON).text == "1000"
        assert made.open_bytes == 0


def test_refusals_are_reported():
    seen = []

    async def call():
        made = Door(count_bytes, DoorRules(key="k"), on_refused=lambda scope, *more: seen.append(more))
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await made(scope, receive, send)
        return sent

    start, body = asyncio.run(call())
    assert start["status"] == seen[0][0] == 401 and json.loads(body["body"])["detail"]
