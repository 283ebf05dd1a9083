"""Retrieval servers, ports and corpora, for real: servers that are down, load, or serve something else."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from doctor_facts import facts_with, found, machine_with

from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.index_builder import main as build_index
from search_r1.search.serving.service import RetrievalService
from verl.doctor.facts_network import port_holder
from verl.doctor.facts_retriever import Question, look_at_corpus, look_at_index, look_at_servers

NOBODY = "http://127.0.0.1:9/retrieve"


def write_corpus(path: Path, title: str = "Title") -> Path:
    lines = [json.dumps({"id": str(i), "contents": f'"{title} {i}"\nsome text {i}'}) for i in range(20)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def serve_file(serve):
    """serve_file(path): a real server over a corpus file."""

    def start(path: Path):
        service = RetrievalService(lambda: BM25Retriever(Corpus.open(path)), str(path), "bm25", 3)
        service.start_loading().join(timeout=30)
        assert service.error is None
        return serve(service)

    return start


def judge(*urls: str, only=("retriever", "port", "corpus"), timeout: float = 0.3, **facts):
    servers = look_at_servers(Question(urls, timeout=timeout))
    return found(facts_with(here=machine_with(servers=servers), **facts), *only)


def test_a_server_that_answers_with_the_corpus_meant_is_no_trouble(tmp_path, serve_file):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    with serve_file(corpus) as address:
        assert judge(f"{address}/retrieve", corpus=look_at_corpus(str(corpus))) == []


def test_a_server_with_another_corpus_is_an_error_that_names_both(tmp_path, serve_file):
    served, meant = write_corpus(tmp_path / "a.jsonl"), write_corpus(tmp_path / "b.jsonl", "Other")
    with serve_file(served) as address:
        (finding,) = judge(f"{address}/retrieve", corpus=look_at_corpus(str(meant)))
    assert f"serves {served}" in finding.what and f"retriever.corpus_path={meant}" in finding.what
    assert finding.do == f"bash retrieval_launch.sh --corpus_path {meant}"


def test_two_servers_with_two_corpora_are_noticed_without_saying_which_is_meant(tmp_path, serve_file):
    one, two = write_corpus(tmp_path / "a.jsonl"), write_corpus(tmp_path / "b.jsonl", "Other")
    with serve_file(one) as first, serve_file(one) as same, serve_file(two) as second:
        assert judge(f"{first}/retrieve", f"{same}/retrieve") == []
        (finding,) = judge(f"{first}/retrieve", f"{second}/retrieve")
    assert "serve different corpora" in finding.what and finding.level.value == "warning"


def test_a_packed_corpus_is_compared_by_the_file_that_the_server_unpacks(tmp_path, serve_file):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    assert look_at_corpus(f"{corpus}.gz").identity == look_at_corpus(str(corpus)).identity
    assert look_at_corpus(str(tmp_path / "no.jsonl")).problem == "No such file or directory"


def test_a_server_that_is_not_there_is_an_error_and_beside_one_that_answers_a_warning(tmp_path, serve_file):
    (finding,) = judge(NOBODY)
    assert (
        f"retriever.url={NOBODY} does not answer searches" in finding.what and finding.level.value == "error"
    )
    assert "bash retrieval_launch.sh" in finding.do
    with serve_file(write_corpus(tmp_path / "corpus.jsonl")) as address:
        (finding,) = judge(f"{address}/retrieve", NOBODY)
    assert finding.level.value == "warning"


def test_a_server_that_still_loads_is_said_to(serve):
    going = threading.Event()

    def load():
        service.report("reading the index")
        going.wait(20)
        return BM25Retriever(Corpus.from_documents([{"id": "0", "contents": '"T"\ntext'}]))

    service = RetrievalService(load, None, "bm25", 3)
    loading = service.start_loading()
    try:
        with serve(service) as address:
            (finding,) = judge(f"{address}/retrieve")
    finally:
        going.set()
        loading.join(timeout=20)
    assert "is still loading (reading the index)" in finding.what


class NoRetriever(BaseHTTPRequestHandler):
    """Some other program that speaks HTTP."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_another_program_on_the_port_is_named():
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoRetriever)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        (finding,) = judge(f"http://127.0.0.1:{server.server_port}/retrieve")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert finding.check == "port" and "(pid " in finding.what and "not JSON" in finding.what
    assert f"--port {server.server_port + 1}" in finding.do


def test_who_listens_on_a_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port_holder(port) is not None and "pid" in port_holder(port)
    assert port_holder(port) is None


def test_a_program_on_our_port_is_not_taken_for_a_server_elsewhere():
    with socket.create_server(("0.0.0.0", 0)) as listener:
        # an address for documentation, which nobody has: private, and not this machine's
        (finding,) = judge(f"http://192.0.2.1:{listener.getsockname()[1]}/retrieve")
    assert finding.check == "retriever" and "192.0.2.1" in finding.what


def test_search_r1s_own_servers_have_no_health_and_are_no_trouble():
    class Plain(NoRetriever):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps({"result": [[{"document": {"contents": "a"}, "score": 1.0}]]}).encode()
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/retrieve"
    try:
        assert judge(url) == []
        (finding,) = judge(url, corpus=look_at_corpus(__file__))
        assert "does not say which corpus it serves" in finding.what and finding.level.value == "warning"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_address_that_is_none_is_refused_by_the_settings():
    with pytest.raises(ValueError, match="expected an address"):
        look_at_servers(Question("localhost:8000"))


@pytest.mark.slow
def test_indexes_that_are_whole_broken_or_not_there(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = [
        "--retrieval_method",
        "bm25",
        "--corpus_path",
        str(corpus),
        "--save_dir",
        str(tmp_path / "index"),
    ]
    assert build_index(flags) == 0
    index = next(path.parent for path in (tmp_path / "index").rglob("manifest.json"))
    whole = look_at_index(str(index))
    assert whole.problem is None and whole.num_bytes > 0 and not whole.on_gpu
    assert found(facts_with(index=whole)) == []
    largest = max(
        (file for file in index.iterdir() if file.suffix != ".json"), key=lambda file: file.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    (finding,) = found(facts_with(index=look_at_index(str(index))))
    assert "the index is not whole" in finding.what
    (finding,) = found(facts_with(index=look_at_index(str(tmp_path / "none"))))
    assert "nothing is there" in finding.what
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in look_at_index(str(tmp_path / "lfs")).problem
