"""The retrieval server over real HTTP: Search-R1's JSON, and a clear 4xx for whatever can't be served."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from search_r1.search import server as server_module
from search_r1.search.bm25 import BM25Retriever
from search_r1.search.client import SearchClient, SearchError
from search_r1.search.server import RetrievalService, main, open_socket

DOCUMENTS = [
    {"id": "a", "contents": '"Amber Harbor"\nA film by Tomas Weld.', "extra": {"deep": [1]}},
    {"id": "b", "contents": '"Tomas Weld"\nA director from Orlen \u2014 \u00e9t\u00e9 \U0001f600.'},
    {"id": "c", "contents": '"Orlen"\nA town.'},
]


def http(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, trust_env=False, timeout=30)


@pytest.fixture(scope="module")
def client(serve_documents) -> Iterator[httpx.Client]:
    with serve_documents(DOCUMENTS) as address, http(address) as client:
        yield client


def post(client: httpx.Client, body: object) -> httpx.Response:
    return client.post("/retrieve", json=body)


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


def test_topk_left_out_or_null_is_the_servers(client, serve_documents):
    with serve_documents(DOCUMENTS, topk=1) as address, http(address) as one:
        for body in ({"queries": ["orlen"]}, {"queries": ["orlen"], "topk": None}):
            assert len(post(one, body).json()["result"][0]) == 1
    assert len(post(client, {"queries": ["orlen"]}).json()["result"][0]) == 2


def test_unknown_fields_are_ignored(client):
    assert post(client, {"queries": ["town"], "topk_rerank": 5, "x": None}).status_code == 200


def test_topk_beyond_the_corpus_gives_what_there_is(client):
    assert len(post(client, {"queries": ["orlen"], "topk": 1000}).json()["result"][0]) == 2


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


def test_return_scores_that_is_no_truth_value_is_refused(client):
    assert post(client, {"queries": ["town"], "return_scores": "yes"}).status_code == 422


def test_limits_on_query_length_number_and_body_size(client, monkeypatch):
    assert post(client, {"queries": ["a" * 16_384]}).status_code == 200
    long = post(client, {"queries": ["town", "a" * 1_000_000]})
    assert (long.status_code, "1000000 characters" in long.text) == (413, True)
    monkeypatch.setattr(server_module, "MAX_QUERIES", 5)
    assert post(client, {"queries": ["town"] * 5}).status_code == 200
    assert post(client, {"queries": ["town"] * 6}).status_code == 413
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 100)
    assert post(client, {"queries": ["town"]}).status_code == 200
    assert "too large" in post(client, {"queries": ["town"] * 30}).text


@pytest.mark.parametrize("query", ["\\ud800", "\\u0000", "\\ud83d\\ude00 orlen", "'\\\\\\\" --"])
def test_odd_characters_are_searched_for_without_an_error(client, query):
    response = client.post("/retrieve", content=b'{"queries": ["%s"], "topk": 2}' % query.encode())
    assert response.status_code == 200
    assert len(response.json()["result"]) == 1


def test_a_wrong_method_or_path_is_a_4xx(client):
    assert client.get("/retrieve").status_code == 405
    assert post(client, {"queries": ["x"]}).status_code == 200
    assert client.post("/retrieval", json={}).status_code == 404


def test_many_clients_at_once_get_their_own_answers(client):
    url = str(client.base_url)
    problems: list[object] = []

    def ask(word: str, identifier: str) -> None:
        with SearchClient(url, cache_size=0) as search:
            for _ in range(20):
                contents = [d["contents"] for d in search.batch_search([word])[0]]
                expected = [d["contents"] for d in DOCUMENTS if d["id"] == identifier]
                if contents != expected:
                    problems.append(contents)

    pairs = [("film", "a"), ("director", "b"), ("town", "c")] * 2
    threads = [threading.Thread(target=ask, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_while_loading_health_answers_and_retrieve_says_503(serve):
    release = threading.Event()

    def load() -> BM25Retriever:
        release.wait(10)
        return BM25Retriever(DOCUMENTS)

    service = RetrievalService(load, "corpus.jsonl", "bm25", topk=3)
    loading = service.start_loading()
    with serve(service) as address, http(address) as client:
        health = client.get("/health").json()
        assert health == {
            "status": "loading",
            "backend": "bm25",
            "corpus_path": "corpus.jsonl",
            "num_documents": None,
        }
        response = post(client, {"queries": ["x"]})
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "loading" in response.json()["detail"]
        assert post(client, {"queries": ["x"], "topk": 0}).status_code == 422
        release.set()
        loading.join(timeout=10)
        health = client.get("/health").json()
        assert (health["status"], health["num_documents"]) == ("ready", 3)
        assert post(client, {"queries": ["town"]}).status_code == 200


def test_the_client_waits_for_a_server_that_is_loading(serve):
    release = threading.Event()

    def load() -> BM25Retriever:
        release.wait(10)
        return BM25Retriever(DOCUMENTS)

    service = RetrievalService(load, "corpus.jsonl", "bm25", topk=3)
    service.start_loading()
    with serve(service) as address, SearchClient(address, timeout=20) as search:
        future = search.submit(["town"])[0]
        time.sleep(0.2)
        assert not future.done()
        release.set()
        assert future.result(timeout=15)[0]["contents"] == DOCUMENTS[2]["contents"]


def test_the_client_hears_why_a_request_was_refused(client):
    with SearchClient(str(client.base_url)) as search, pytest.raises(SearchError, match="topk: found 5000"):
        search.batch_search(["town"], topk=5000)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--corpus_path", "nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--corpus_path", __file__, "--retriever_name", "e5"], "only 'bm25' so far"),
        (["--corpus_path", __file__, "--topk", "0"], "--topk: found 0"),
        (["--corpus_path", __file__, "--index_path", __file__], "is a file"),
        (["--corpus_path", __file__, "--port", "70000"], "can't listen"),
    ],
)
def test_a_flag_that_cannot_be_served_is_one_line_and_status_1(capsys, flags, message):
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_taken_port_is_one_line_and_status_1(capsys, tmp_path):
    corpus = write_corpus(tmp_path)
    with open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--corpus_path", str(corpus), "--host", "127.0.0.1", "--port", port]) == 1
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err


def test_replies_do_not_wait_for_acknowledgements():
    with open_socket("127.0.0.1", 0) as listener:  # asyncio sets TCP_NODELAY only on sockets that name TCP
        assert listener.proto == socket.IPPROTO_TCP


def write_corpus(folder: Path, more: str = "") -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS) + more)
    return path


@contextmanager
def start_process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_program_serves_search_r1s_bm25_command_and_stops_on_ctrl_c(tmp_path):
    flags = [
        "--index_path",
        str(tmp_path / "bm25"),
        "--corpus_path",
        str(write_corpus(tmp_path)),
        "--topk",
        "1",
    ]
    with start_process(
        *flags, "--retriever_name", "bm25", "--retriever_model", "x", "--faiss_gpu"
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with SearchClient(url, topk=1, timeout=30) as search:
            assert search.batch_search(["film"])[0][0]["contents"] == DOCUMENTS[0]["contents"]
        assert (tmp_path / "bm25" / "fingerprint.json").exists()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors
    assert process.returncode == 0


def test_a_request_that_never_ends_does_not_keep_the_program_from_stopping(tmp_path):
    with start_process("--corpus_path", str(write_corpus(tmp_path))) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


def test_the_program_ends_with_the_line_number_of_a_broken_corpus(tmp_path):
    with start_process("--corpus_path", str(write_corpus(tmp_path, more="{broken\n"))) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "corpus.jsonl, line 4: not valid JSON" in errors
    assert "Traceback" not in errors


def test_the_search_folder_needs_neither_torch_nor_ray():
    code = (
        "import sys, search_r1.search.server, search_r1.search.bm25, search_r1.search.client\n"
        "print(sorted({'torch', 'ray', 'transformers', 'omegaconf', 'pandas'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
