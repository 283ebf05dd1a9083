"""The server when things go wrong: a backend that hangs or raises, a full queue, clients that are slow, leave
or never stop, and a stop in the middle of it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from server_parts import EchoRetriever, echo_service, http, post

from verl.utils import serving


@contextmanager
def connect(address: str) -> Iterator[socket.socket]:
    split = urlsplit(address)
    with socket.create_connection((split.hostname, split.port), timeout=20) as connection:
        yield connection


def head(length: int) -> bytes:
    return f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_body_that_drips_is_refused_with_408(serve, monkeypatch):
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.3)
    with serve(echo_service()) as address, connect(address) as connection:
        connection.sendall(head(1000) + b" ")
        reply = b"".join(iter(lambda: connection.recv(2**16), b""))  # the server closes the connection
        assert reply.startswith(b"HTTP/1.1 408") and b"within 0.3 s" in reply


def test_the_bodies_of_all_open_requests_are_bounded(serve, monkeypatch):
    monkeypatch.setattr(serving, "MAX_OPEN_BYTES", 3000)
    body = {"queries": ["x" * 1800]}
    with serve(echo_service()) as address, http(address) as client:
        with connect(address) as connection:
            connection.sendall(head(2000) + b" " * 1900)
            while post(client, body).status_code == 200:
                time.sleep(0.01)
            refused = post(client, body)
            assert refused.status_code == 503 and "large requests" in refused.json()["detail"]
        while post(client, body).status_code != 200:  # the other one has gone
            time.sleep(0.01)


def test_a_backend_that_hangs_costs_each_request_its_deadline_and_no_more(serve):
    retriever = EchoRetriever()
    service = echo_service(retriever, request_timeout_s=0.5)
    retriever.gate.clear()
    with serve(service) as address, http(address) as client, ThreadPoolExecutor(8) as pool:
        started = time.monotonic()
        bodies = [{"queries": [f"q{n}"]} for n in range(8)]
        responses = list(pool.map(lambda body: post(http(address), body), bodies))
        assert {response.status_code for response in responses} == {504}
        assert "within 0.5 s" in responses[0].json()["detail"]
        assert time.monotonic() - started < 3
        assert client.get("/health").json()["status"] == "ready"
        retriever.gate.set()
        assert post(client, {"queries": ["again"]}).status_code == 200
    assert "q7" not in retriever.searched or len(retriever.calls[0][0]) > 1


def test_a_full_queue_is_503_with_retry_after_and_later_all_is_well(serve):
    retriever = EchoRetriever()
    retriever.gate.clear()
    with serve(echo_service(retriever, max_queue=8)) as address, http(address) as client:
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(post, http(address), {"queries": [f"q{n}"]}) for n in range(16)]
            while sum(future.done() for future in futures) < 8:
                time.sleep(0.01)
            refused = [future.result() for future in futures if future.done()]
            assert {response.status_code for response in refused} == {503}
            assert {response.headers["Retry-After"] for response in refused} == {"1"}
            assert "queue is full" in refused[0].json()["detail"]
            retriever.gate.set()
            statuses = sorted(future.result().status_code for future in futures)
        assert statuses == [200] * 8 + [503] * 8
        assert post(client, {"queries": [f"r{n}" for n in range(8)]}).status_code == 200


def test_a_backend_that_raises_is_a_500_for_that_query_alone(serve, caplog):
    with serve(echo_service()) as address, http(address) as client:
        response = post(client, {"queries": ["good", "poison"]})
        assert response.status_code == 500
        assert "choked" not in response.text  # the reason may hold paths or keys; it is for the log
        assert post(client, {"queries": ["good"]}).status_code == 200
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert "choked" in caplog.text


def test_queries_of_a_client_that_left_are_not_searched(serve):
    retriever = EchoRetriever()
    service = echo_service(retriever)
    retriever.gate.clear()
    with serve(service) as address, ThreadPoolExecutor(1) as pool:
        blocker = pool.submit(post, http(address), {"queries": ["blocker"]})
        assert retriever.entered.wait(10)
        body = json.dumps({"queries": ["of nobody"]}).encode()
        with connect(address) as connection:
            connection.sendall(head(len(body)) + body)
            wait_until(lambda: service.batcher.num_queries == 2)
        wait_until(lambda: service.batcher.num_queries == 1)
        retriever.gate.set()
        assert blocker.result().status_code == 200
        assert post(http(address), {"queries": ["next"]}).status_code == 200
    assert retriever.searched == ["blocker", "next"]


def wait_until(condition, seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_too_many_documents_in_one_reply_are_refused(serve):
    with serve(echo_service()) as address, http(address) as client:
        response = post(client, {"queries": ["x"] * 2000, "topk": 1000})
        assert response.status_code == 413 and "200000 documents" in response.json()["detail"]


def test_open_requests_are_answered_when_the_server_stops(serve):
    retriever = EchoRetriever()
    retriever.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        with serve(echo_service(retriever)) as address:
            future = pool.submit(post, http(address), {"queries": ["last"]})
            assert retriever.entered.wait(10)
            threading.Timer(0.5, retriever.gate.set).start()
        assert future.result().json()["result"][0][0]["id"] == "last/0"
        with pytest.raises(httpx.ConnectError):
            post(http(address), {"queries": ["too late"]})
    assert retriever.closed
