"""Retrieval servers, ports, proxies and corpora: servers that are down, load, or serve something else."""

import json
import os
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from corpus_parts import corpus_of_documents
from preflight_cases import ScriptedProbe, find, target_of

from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.index_builder import main as build_index
from search_r1.search.manifest import Manifest, write_manifest
from search_r1.search.probe import RetrievalProbe, ServerState
from search_r1.search.serving.service import RetrievalService

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


def look(*urls: str, corpus: object = None, timeout: float = 10):
    """What the checks of servers find."""
    settings = [f"retriever.url='{','.join(urls)}'", f"retriever.timeout={timeout}"]
    if corpus is not None:
        settings.append(f"retriever.corpus_path={corpus}")
    target = target_of(*settings, probe=RetrievalProbe())
    return [finding for name in ("retriever", "corpus") for finding in find(name, target)]


def test_a_server_with_the_corpus_meant_is_no_trouble_and_another_corpus_is_an_error(tmp_path, serve_file):
    served = write_corpus(tmp_path / "a.jsonl")
    meant = write_corpus(tmp_path / "b.jsonl", "Other")
    with serve_file(served) as address:
        url = f"{address}/retrieve"
        assert look(url, corpus=served) == [] == look(url, corpus=f"{served}.gz")
        (finding,) = look(url, corpus=meant)
        assert "No such file" in look(url, corpus=tmp_path / "none.jsonl")[0].what
    assert f"serves {served.name}" in finding.what and f"retriever.corpus_path={meant}" in finding.what
    assert finding.do == f"bash retrieval_launch.sh --corpus_path {meant}" and finding.level == "error"


def test_a_server_that_is_not_there_is_an_error_and_beside_one_that_answers_a_warning(tmp_path, serve_file):
    (finding,) = look(NOBODY, timeout=0.3)
    assert f"retriever.url={NOBODY} does not answer searches" in finding.what and finding.level == "error"
    assert finding.do.startswith("bash retrieval_launch.sh, or do_search=false")
    with serve_file(write_corpus(tmp_path / "corpus.jsonl")) as address:
        (finding,) = look(f"{address}/retrieve", NOBODY, timeout=2)
    assert finding.level == "warning" and "the other servers" in finding.why


def test_a_server_that_still_loads_is_said_to(serve):
    going = threading.Event()

    def load():
        service.progress = "reading the index"
        going.wait(20)
        return BM25Retriever(corpus_of_documents([{"id": "0", "contents": '"T"\ntext'}]))

    service = RetrievalService(load, None, "bm25", 3)
    loading = service.start_loading()
    try:
        with serve(service) as address:
            (finding,) = look(f"{address}/retrieve", timeout=0.5)
    finally:
        going.set()
        loading.join(timeout=20)
    assert "is still loading (reading the index)" in finding.what


class OtherProgram(BaseHTTPRequestHandler):
    """Something that speaks HTTP; `answer` is what it says to everything."""

    answer = b"<html>hello</html>"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


class SearchR1Server(OtherProgram):
    """As Search-R1's own: no /health."""

    answer = json.dumps({"result": [[{"document": {"contents": "a"}, "score": 1.0}]]}).encode()


@pytest.fixture
def http_server(request):
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("http_server", [OtherProgram], indirect=True)
def test_another_program_on_the_port_is_named(http_server):
    (finding,) = look(f"http://127.0.0.1:{http_server.server_port}/retrieve", timeout=1)
    assert f"port {http_server.server_port} of this machine is held by" in finding.what
    assert "(pid " in finding.what and "not JSON" in finding.what
    assert f"--port {http_server.server_port + 1}" in finding.do


@pytest.mark.parametrize("http_server", [SearchR1Server], indirect=True)
def test_search_r1s_own_servers_have_no_health_and_are_no_trouble(http_server):
    url = f"http://127.0.0.1:{http_server.server_port}/retrieve"
    assert look(url) == []
    (finding,) = look(url, corpus=__file__)
    assert "does not say which corpus it serves" in finding.what and finding.level == "warning"


@pytest.mark.parametrize(
    ("variables", "url", "words"),
    [
        ({"http_proxy": "http://p:3128"}, "http://gamma:8000/r", "NO_PROXY and no_proxy do not hold"),
        ({"HTTP_PROXY": "http://u:pw@p:1", "NO_PROXY": "gamma"}, "http://gamma:8000/r", "no_proxy does not"),
        ({"http_proxy": "http://p:1", "no_proxy": ".gamma,10.0.0.0/8", "NO_PROXY": "gamma"},
         "http://gamma:8000/r", "no_proxy does not hold gamma"),
        ({"all_proxy": "http://p:1"}, "http://10.0.0.7:8000/r", "NO_PROXY and no_proxy"),
        ({"http_proxy": "http://p:1", "no_proxy": "gamma", "NO_PROXY": "a, gamma"}, "http://gamma:8/r", None),
        ({"https_proxy": "http://p:1"}, "http://gamma:8000/r", None),
        ({"http_proxy": "http://p:1"}, "http://search.example.com/r", None),  # outside of it
        ({}, "http://gamma:8000/r", None),
    ],
)  # fmt: skip
def test_a_proxy_catches_servers_of_this_network_unless_both_spellings_hold_the_exact_name(
    variables, url, words, monkeypatch
):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    addresses = {"10": ("10.0.0.7",), "search": ("93.184.216.34",)}.get(url[7:].split(".")[0], ())
    findings = find("proxy", target_of(probe=ScriptedProbe(ServerState(url, None, addresses))))
    assert [words in finding.what for finding in findings] == ([] if words is None else [True])
    assert all("pw" not in finding.line and "export no_proxy" in finding.do for finding in findings)


@pytest.mark.slow
def test_indexes_that_are_whole_broken_or_not_there(tmp_path, monkeypatch):
    def look(path: Path):
        return find("index", target_of(probe=RetrievalProbe(), index_path=str(path)))

    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = ["--corpus_path", str(corpus), "--save_dir", str(tmp_path / "index")]
    assert build_index(["--retrieval_method", "bm25", *flags]) == 0
    index = next(path.parent for path in (tmp_path / "index").rglob("manifest.json"))
    assert look(index) == []
    files = [file for file in index.iterdir() if file.suffix != ".json"]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert "the index is not whole" in look(index)[0].what
    assert "it does not exist" in look(tmp_path / "none")[0].what
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in look(tmp_path / "lfs")[0].what


def test_an_index_is_counted_as_it_is_copied_to_each_gpu(tmp_path, monkeypatch):
    path = tmp_path / "e5_Flat.index"
    sizes = struct.pack("<iqqq?iQ", 768, 21_015_324, 0, 0, True, 0, 21_015_324 * 768)
    path.write_bytes(b"IxFI" + sizes)
    os.truncate(path, 45 + 4 * 21_015_324 * 768)  # 65 GB, of which the disk has a block
    target = target_of(probe=RetrievalProbe(), index_path=str(path))
    free = [24 * 10**9, 24 * 10**9]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free[gpu], 25 * 10**9))
    assert find("index", target) == []
    free[1] = 10 * 10**9
    (finding,) = find("index", target)
    assert finding.level == "error" and "GPU 1 has 10.0 GB of 25.0 GB free (CUDA_VISIBLE_DEV" in finding.what
    exact = tmp_path / "e5_exact"
    exact.mkdir()
    (exact / "embeddings.f16").write_bytes(bytes(2 * 20 * 8))
    corpus = Corpus.open(write_corpus(tmp_path / "corpus.jsonl")).fingerprint()
    write_manifest(exact, Manifest("exact", corpus, {"dtype": "float16", "dimension": 8}, {}))
    free[1] = 10**9  # less than what an encoder and CUDA take
    (finding,) = find("index", target_of(probe=RetrievalProbe(), index_path=str(exact)))
    assert "20 x 8 in float16: 2.1 GB on each of 2 GPUs" in finding.what and "GPU 1 has 1.0" in finding.what
    path.write_bytes(b"IHNf" + sizes)  # HNSW is searched on the CPU
    assert find("index", target) == []
    monkeypatch.setattr("verl.preflight.run_checks.memory_of_machine", lambda: 40)
    (finding,) = find("index", target)
    assert finding.level == "warning" and "has 45 bytes, this machine 40 bytes of memory" in finding.what


def test_a_corpus_is_not_looked_at_by_a_run_that_does_not_search(tmp_path):
    settings = ["do_search=false", f"retriever.corpus_path={tmp_path / 'none.jsonl'}"]
    assert find("corpus", target_of(*settings, probe=RetrievalProbe())) == []
