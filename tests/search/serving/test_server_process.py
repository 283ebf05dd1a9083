"""The server as a program: flags, start, signals, exit status."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from server_parts import (
    DOCUMENTS,
    EchoRetriever,
    http,
    post,
    read_address,
    start_process,
    write_bm25,
    write_corpus,
)

from search_r1.search import server
from search_r1.search.client import SearchClient
from search_r1.search.server import main, open_socket


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--corpus_path", "nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--corpus_path", __file__, "--retriever_name", "bm52"], "bm25"),
        (["--corpus_path", __file__, "--workers", "0"], "--workers: found 0"),
        (["--corpus_path", __file__, "--max_batch", "0"], "--max_batch: found 0"),
        (["--corpus_path", __file__, "--request_timeout_s", "nan"], "--request_timeout_s: found nan"),
        (["--corpus_path", __file__, "--topk", "0"], "--topk: found 0"),
        (["--corpus_path", __file__, "--port", "70000"], "can't listen"),
    ],
)
def test_a_flag_that_cannot_be_served_is_one_line_and_status_2(capsys, flags, message):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_taken_port_is_one_line_and_status_2(capsys, tmp_path):
    corpus = write_corpus(tmp_path)
    with open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--corpus_path", str(corpus), "--host", "127.0.0.1", "--port", port]) == 2
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key", "is_open"),
    [([], "", True), (["--host", "127.0.0.1"], "", False), ([], "s3cret", False)],
)
def test_a_server_that_everybody_may_ask_says_so(capsys, monkeypatch, tmp_path, flags, key, is_open):
    monkeypatch.setenv("SEARCH_R1_API_KEY", key)
    monkeypatch.setattr("search_r1.search.server.create_service", lambda arguments: pytest.fail("served"))
    with pytest.raises(pytest.fail.Exception):
        main(["--corpus_path", str(write_corpus(tmp_path)), "--port", "0", *flags])
    assert ("without a key: whoever reaches this machine can search" in capsys.readouterr().err) == is_open


def test_several_workers_on_a_gpu_are_refused_with_the_reason(monkeypatch, tmp_path):
    retriever = EchoRetriever()
    monkeypatch.setattr(server, "open_retriever", lambda *_: retriever)
    monkeypatch.setattr(server, "uses_gpu", lambda: True)
    flags = ["--corpus_path", str(write_corpus(tmp_path)), "--workers", "2"]
    service = server.create_service(server.build_server_parser().parse_args(flags))
    service.start_loading().join(10)
    assert "--workers: found 2 with a backend on a GPU" in str(service.error)
    assert retriever.closed


@pytest.mark.slow
def test_the_program_serves_search_r1s_bm25_command_and_stops_on_ctrl_c(tmp_path):
    flags = ["--index_path", str(tmp_path / "bm25"), "--corpus_path", str(write_bm25(tmp_path))]
    flags += ["--topk", "1", "--retriever_name", "bm25", "--retriever_model", "x", "--faiss_gpu"]
    with start_process(*flags) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with SearchClient(url, topk=1, timeout=30) as search:
            assert search.batch_search(["film"])[0][0]["contents"] == DOCUMENTS[0]["contents"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors
    assert process.returncode == 0


def test_sigterm_ends_it_with_status_0_though_a_request_never_ends(tmp_path):
    with start_process("--corpus_path", str(write_corpus(tmp_path))) as process:
        port = urlsplit(read_address(process)).port
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors


def test_the_api_key_is_taken_from_the_environment(tmp_path):
    corpus = str(write_corpus(tmp_path))
    with (
        start_process("--corpus_path", corpus, SEARCH_R1_API_KEY="s3cret") as process,
        http(read_address(process)) as client,
    ):
        assert post(client, {"queries": ["film"]}).status_code == 401


def test_the_search_folder_needs_neither_torch_nor_ray():
    code = (
        "import sys, search_r1.search.server, search_r1.search.bm25, search_r1.search.client\n"
        "print(sorted({'torch', 'ray', 'transformers', 'omegaconf', 'pandas'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
