"""Search-R1's launchers, line by line as they stand in that repository (commit a14dc3a), start here.

Each is run as a shell would run it, with its variables set to files of the test, up to the server that
answers, or to the clean refusal of a key or a model that is missing.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from server_parts import DOCUMENTS, write_bm25, write_corpus

ROOT = Path(__file__).parents[2]
FREE_PORT = " --host 127.0.0.1 --port 0"  # as the tests need it; everything before it is Search-R1's

FILES = "--index_path $index_file --corpus_path $corpus_file"
SERVER = f"python search_r1/search/retrieval_server.py {FILES} --topk 3 "
ENCODER = "--retriever_name $retriever_name --retriever_model $retriever_path"
SERPAPI = "--search_url $search_url --topk 3 --serp_api_key $serp_api_key"
GOOGLE = "--api_key $api_key --topk 5 --cse_id $cse_id --snippet_only"
LAUNCHERS = {
    "retrieval_launch.sh": f"{SERVER}{ENCODER} --faiss_gpu",
    "example/retriever/retrieval_launch_ann.sh": SERVER + ENCODER,
    "example/retriever/retrieval_launch_bm25.sh": SERVER + "--retriever_name $retriever_name",
    "example/retriever/retrieval_launch_hierarchical.sh": "python search_r1/search/"
    f"retrieval_rerank_server.py {FILES} --retrieval_topk 10 {ENCODER} --faiss_gpu "
    "--reranking_topk 3 --reranker_model $reranker_path --reranker_batch_size 32",
    "example/retriever/retrieval_launch_google.sh": "python search_r1/search/internal_google_server.py "
    + GOOGLE,
    "example/retriever/retrieval_launch_serpapi.sh": "python search_r1/search/online_search_server.py "
    + SERPAPI,
    "docs/retriever.md, SerpAPI": "python search_r1/search/serp_search_server.py " + SERPAPI,
    "docs/retriever.md, Google": "python search_r1/search/google_search_server.py " + GOOGLE,
    "search_r1/search/build_index.sh": "python index_builder.py --retrieval_method $retriever_name "
    "--model_path $retriever_model --corpus_path $corpus_file --save_dir $save_dir --use_fp16 "
    "--max_length 256 --batch_size 512 --pooling_method mean --faiss_type Flat --save_embedding",
    "search_r1/search/retrieval.sh": "python retrieval.py --retrieval_method e5 --retrieval_topk $TOPK "
    "--index_path $INDEX_PATH --corpus_path $CORPUS_PATH --dataset_path $DATASET_PATH --data_split $SPLIT "
    '--retrieval_model_path "intfloat/e5-base-v2" --retrieval_pooling_method "mean" '
    "--retrieval_batch_size 512",
}


def command(launcher: str, more: str = "", **variables: object) -> list[str]:
    """The launcher's command with its variables set, as a shell splits it: an empty one vanishes."""
    line = LAUNCHERS[launcher] + more
    for name in sorted(variables, key=len, reverse=True):
        line = line.replace(f"${name}", shlex.quote(str(variables[name])) if variables[name] != "" else "")
    assert "$" not in line
    return [sys.executable, *shlex.split(line)[1:]]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    status: int
    out: str
    error: str


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., Ended]:
    """run(command, folder=ROOT): its program in this process, which has imported what it needs."""

    def run_program(parts: list[str], folder: Path = ROOT) -> Ended:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", parts[1:])
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(parts[1], run_name="__main__")
        return Ended(int(end.value.code or 0), *capsys.readouterr())

    return run_program


def ask(parts: list[str], fields: dict) -> dict:
    """Starts a server, waits until it is ready, asks it once, and stops it as Ctrl-C does."""
    with subprocess.Popen(
        parts, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().split()[-1]
            for line in process.stderr:
                if line.startswith("ready: "):
                    break
            reply = httpx.post(url, json=fields, trust_env=False, timeout=60).json()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
    return reply


def test_the_bm25_launcher_serves(tmp_path):
    parts = command(
        "example/retriever/retrieval_launch_bm25.sh",
        FREE_PORT,
        index_file=tmp_path / "bm25",
        corpus_file=write_bm25(tmp_path),
        retriever_name="bm25",
    )
    reply = ask(parts, {"queries": ["town"], "topk": 3, "return_scores": True})
    assert [item["document"] for item in reply["result"][0]] == [DOCUMENTS[2]]


@pytest.mark.parametrize(
    "launcher",
    [
        "retrieval_launch.sh",
        "example/retriever/retrieval_launch_ann.sh",
        "example/retriever/retrieval_launch_hierarchical.sh",
    ],
)
def test_a_dense_launcher_whose_index_is_not_there_says_so(run, tmp_path, launcher):
    parts = command(
        launcher,
        index_file=tmp_path / "e5_Flat.index",
        corpus_file=write_corpus(tmp_path),
        retriever_name="e5",
        retriever_path="intfloat/e5-base-v2",
        reranker_path="cross-encoder/ms-marco-MiniLM-L12-v2",
    )
    done = run(parts)
    index = tmp_path / "e5_Flat.index"
    assert done.error == f"error: --index_path: {index} does not exist, e5 needs a dense index\n"
    assert done.status == 2


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if "google" in LAUNCHERS[name]])
@pytest.mark.parametrize("api_key, cse_id", [("", ""), ("key", "")])
def test_the_google_launchers_ask_for_what_is_missing(run, launcher, api_key, cse_id):
    done = run(command(launcher, api_key=api_key, cse_id=cse_id))
    assert done.status == 2 and "expected one argument" in done.error


def test_the_api_key_of_the_google_launchers_is_googles_not_the_clients():
    """One of them, whose program runs that of the other."""
    launcher = "example/retriever/retrieval_launch_google.sh"
    parts = command(launcher, FREE_PORT, api_key="googles-key", cse_id="my-engine")
    with subprocess.Popen(
        parts, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            health = httpx.get(url.replace("/retrieve", "/health"), trust_env=False, timeout=30).json()
        finally:
            process.kill()
    assert (health["backend"], health["topk"], health["api_key_needed"]) == ("google", 5, False)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if "serp" in LAUNCHERS[name]])
def test_the_serpapi_launchers_refuse_to_serve_without_a_key(run, launcher):
    parts = command(launcher, search_url="https://serpapi.com/search", serp_api_key="")
    assert run(parts).status == 2


def test_a_serpapi_launcher_serves_with_a_key():
    """One of them, whose program runs that of the other."""
    launcher = "example/retriever/retrieval_launch_serpapi.sh"
    parts = command(launcher, FREE_PORT, search_url="http://127.0.0.1:1/search", serp_api_key="key")
    reply = ask(parts, {"queries": [], "topk": 3})
    assert reply == {"result": []}


def test_the_index_builders_launcher_names_the_encoder_that_is_missing(run, tmp_path):
    parts = command(
        "search_r1/search/build_index.sh",
        corpus_file=write_corpus(tmp_path),
        save_dir=tmp_path / "indexes",
        retriever_name="e5",
        retriever_model=tmp_path / "no-model",
    )
    done = run(parts, ROOT / "search_r1" / "search")
    assert done.status in (1, 2) and "no-model" in done.error and "Traceback" not in done.error


def test_retrieval_without_a_server_names_the_data_set_that_is_missing(run, tmp_path):
    parts = command(
        "search_r1/search/retrieval.sh",
        TOPK=3,
        SPLIT="test",
        INDEX_PATH=tmp_path,
        CORPUS_PATH=write_corpus(tmp_path),
        DATASET_PATH=tmp_path / "nq",
    )
    done = run(parts, ROOT / "search_r1" / "search")
    assert done.status == 2
    assert done.error.startswith(f"error: --dataset_path: can't read {tmp_path}/nq/test.jsonl")


def test_retrieval_without_a_server_prints_what_it_finds(run, tmp_path, capsys):
    (tmp_path / "test.jsonl").write_text('{"question": "town"}\n{"question": "film"}\n')
    flags = f"--retrieval_method bm25 --retrieval_topk 1 --index_path {tmp_path} --dataset_path {tmp_path} "
    flags += f"--corpus_path {write_bm25(tmp_path)} --data_split test --faiss_gpu True"
    capsys.readouterr()
    done = run([sys.executable, "search_r1/search/retrieval.py", *flags.split()])
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["question"], line["documents"]) for line in lines] == [
        ("town", [DOCUMENTS[2]]),
        ("film", [DOCUMENTS[0]]),
    ]
    assert all(len(line["scores"]) == 1 for line in lines)


def test_the_reranker_serves_search_r1s_json(tmp_path):
    """RerankRequest of Search-R1's search_r1/search/rerank_server.py."""
    from fastapi.testclient import TestClient

    from search_r1.search.rerank_server import create_app, main

    class ByLength:
        def score(self, pairs: list[tuple[str, str]]) -> list[float]:
            return [float(len(text)) for _, text in pairs]

    client = TestClient(create_app(ByLength(), rerank_topk=2))  # type: ignore[arg-type]
    short, middle, long = ({"contents": "x" * size} for size in (1, 5, 9))
    fields = {"queries": ["a", "b"], "documents": [[short, long, middle], [{"document": short}]]}
    assert client.post("/rerank", json=fields).json() == {"result": [[long, middle], [{"document": short}]]}
    scored = client.post("/rerank", json=fields | {"rerank_topk": 1, "return_scores": True}).json()
    assert scored["result"][0] == [{"document": long, "score": 9.0}]
    assert client.post("/rerank", json=fields | {"queries": ["a"]}).status_code == 422
    assert client.post("/rerank", json={"queries": ["a"], "documents": [[{}]]}).status_code == 422
    assert main(["--rerank_model_name_or_path", str(tmp_path / "none")]) == 2


def test_the_runtime_environment_of_the_multinode_scripts_is_there():
    """`ray job submit --runtime-env=verl/trainer/runtime_env.yaml` in example/multinode/*.sh."""
    import yaml

    fields = yaml.safe_load((ROOT / "verl" / "trainer" / "runtime_env.yaml").read_text())
    assert fields["working_dir"] == "./" and "/.git/" in fields["excludes"]


def test_a_typo_in_a_retrievers_name_is_told_before_anything_is_installed(tmp_path):
    """With nothing but a bare Python on the path, and no environment that could be used."""
    python = Path(sys.base_prefix) / "bin"
    bare = {"PATH": f"{python}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "retrieval_launch.sh"), "--retriever_name", "bm52"],
        env=bare,
        capture_output=True,
        text=True,
        timeout=2,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: --retriever_name: found 'bm52'; did you mean 'bm25'?\n"


@pytest.mark.parametrize(
    "flags, printed",
    [
        ("", "retrieval microworld"),
        ("--port 7", "retrieval microworld"),
        ("--corpus_path {corpus}", "retrieval "),
        ("--corpus_path {corpus} --reranker_model some/model", "retrieval,dense "),
        ("--retriever_name serpapi", "retrieval "),
        ("--corpus_path {corpus} --retriever_name e5 --index_path {faiss}", "retrieval,dense,faiss "),
        (
            "--corpus_path {corpus} --retriever_name e5 --index_path {faiss} --faiss_gpu",
            "retrieval,dense,faiss-gpu ",
        ),
        ("--corpus_path {corpus} --retriever_name lucene --index_path {lucene}", "retrieval,pyserini "),
    ],
)
def test_the_launcher_installs_what_the_flags_need(tmp_path, capsys, flags, printed):
    from search_r1.search.launch import main

    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene" / "segments_2").touch()
    (tmp_path / "e5.index").write_bytes(b"IxFI" + bytes(40))
    files = {"corpus": write_corpus(tmp_path), "faiss": tmp_path / "e5.index", "lucene": tmp_path / "lucene"}
    assert main(flags.format(**files).split()) == 0
    assert capsys.readouterr().out == printed + "\n"
