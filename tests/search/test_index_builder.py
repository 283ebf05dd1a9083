"""The index builder: a bad corpus stops it at once, a kill costs little, nothing is mixed up."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.index_builder import main
from search_r1.search.manifest import check_manifest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "search_r1.search.index_builder"]
WORDS = ["amber", "harbor", "lantern", "copper", "river", "town", "director", "novel", "film", "quist"]


@pytest.fixture
def write(tmp_path):
    def write_file(num: int = 50, edit: str = "") -> Path:
        rng = random.Random(0)
        path = tmp_path / "corpus.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for k in range(num):
                text = f'"Title {k}"\n' + " ".join(rng.choices(WORDS, k=30)) + f" number{k}"
                file.write(json.dumps({"id": str(k), "contents": text}) + "\n")
            file.write(edit)
        return path

    return write_file


def build(corpus: Path, folder: Path, *flags: str) -> int:
    words = ["--corpus_path", str(corpus), "--save_dir", str(folder), "--num_processes", "1", *flags]
    return main(["--retrieval_method", "bm25", *words])


def test_a_bm25_index_is_built_and_serves_its_corpus(write, tmp_path, capsys):
    corpus = write()
    assert build(corpus, tmp_path / "out") == 0
    index = tmp_path / "out" / "bm25"
    assert capsys.readouterr().out == f"built {index}\n"
    with Corpus.open(corpus) as opened:
        manifest = check_manifest(index, opened, "bm25", full=True)
        retriever = BM25Retriever(opened, index)
        found, _ = retriever.batch_search(["number17"], 1)
        assert found[0][0].fields["id"] == "17"
        retriever.close()
    assert manifest.corpus["num_documents"] == 50
    before = {path: path.stat().st_mtime_ns for path in index.iterdir()}
    assert build(corpus, tmp_path / "out") == 0
    assert capsys.readouterr().out == f"{index} is built already\n"
    assert {path: path.stat().st_mtime_ns for path in index.iterdir()} == before


def test_a_corpus_with_broken_lines_stops_the_build_before_it_begins(write, tmp_path, capsys):
    corpus = write(edit='{"id": "50"\n{"id": "51", "text": "x"}\n')
    assert build(corpus, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "error: " in error and "has 2 broken lines" in error
    assert "\n  line 51: not valid JSON" in error and "\n  line 52: expected the text" in error
    assert not (tmp_path / "out").exists()


def test_check_only_builds_nothing_and_says_what_the_corpus_is(write, tmp_path, capsys):
    corpus = write(edit='{"contents": "  "}\n')
    assert main(["--check_only", "--corpus_path", str(corpus), "--num_processes", "1"]) == 0
    error = capsys.readouterr().err
    assert "51 documents" in error and "sha256" in error and "in order" in error
    assert "1 documents without text" in error and "line 51: the contents are empty" in error
    assert main(["--check_only", "--corpus_path", str(write(edit="x")), "--num_processes", "1"]) == 2
    assert not (tmp_path / "indexes").exists()


def test_an_edited_corpus_is_told_from_the_one_that_was_indexed(write, tmp_path, capsys):
    corpus = write()
    assert build(corpus, tmp_path / "out") == 0
    corpus.write_text(corpus.read_text().replace("number17", "number71"))
    with (
        Corpus.open(corpus) as opened,
        pytest.raises(ValueError, match="50 documents.*50 documents.*--overwrite`"),
    ):
        check_manifest(tmp_path / "out" / "bm25", opened)
    capsys.readouterr()
    assert build(corpus, tmp_path / "out") == 2
    assert "of another corpus (50 documents" in capsys.readouterr().err
    assert build(corpus, tmp_path / "out", "--overwrite") == 0
    with Corpus.open(corpus) as opened:
        assert check_manifest(tmp_path / "out" / "bm25", opened, full=True) is not None


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--retrieval_method is missing"),
        (["--retrieval_method", "bm25", "--num_processes", "-1"], "--num_processes: found -1"),
        (["--retrieval_method", "bm25", "--memory_limit_gb", "0.1"], "--memory_limit_gb: found 0.1"),
        (["--retrieval_method", "e5", "--max_length", "0"], "--max_length: found 0"),
        (["--retrieval_method", "e5", "--faiss_type", "IVF4,Flat", "--faiss_gpu"], "--faiss_gpu: "),
        (["--retrieval_method", "bm25", "--corpus_path", "nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--retrieval_method", "bm52"], "--retrieval_method: found 'bm52'; did you mean 'bm25'?"),
        (["--retrieval_method", "lucine"], "did you mean 'lucene'?"),
        (["--retrieval_method", "contreiver"], "did you mean 'contriever'?"),
        (["--retrieval_method", "mine"], "--model_path is missing: the encoder for 'mine'"),
        (["--retrieval_method", "google"], "--retrieval_method: found 'google'"),
        (["--retrieval_method", "bm25+e5"], "--retrieval_method: found 'bm25+e5'"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line_and_status_2(write, capsys, flags, message):
    assert main(["--corpus_path", str(write()), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_help_loads_no_heavy_module():
    program = (
        "import sys; from search_r1.search.index_builder import main\n"
        "try: main(['--help'])\n"
        "finally: print({'torch', 'faiss', 'numba', 'jnius', 'transformers', 'ray'} & set(sys.modules))"
    )
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert "--faiss_type" in output and output.endswith("\nset()\n")


@pytest.mark.parametrize(
    "start", [["-m", "search_r1.search.index_builder"], ["search_r1/search/index_builder.py"]]
)
def test_a_typo_is_said_in_two_seconds_with_status_2_also_when_started_by_path(write, start):
    words = [*start, "--retrieval_method", "bm52", "--corpus_path", str(write())]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # nothing heavy is imported
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --retrieval_method: found 'bm52'; did you mean 'bm25'?\n"


def test_git_ignores_the_folder_of_indexes():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    ignored = subprocess.run(["git", "check-ignore", "-q", "indexes/bm25"], cwd=ROOT, timeout=60)
    assert ignored.returncode == 0


def start(corpus: Path, folder: Path) -> subprocess.Popen:
    flags = ["--retrieval_method", "bm25", "--corpus_path", str(corpus), "--save_dir", str(folder)]
    return subprocess.Popen(
        [*PROGRAM, *flags, "--num_processes", "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background are started with Ctrl-C ignored, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_index_of_an_undisturbed_build(write, tmp_path):
    corpus = write(20_000)
    assert build(corpus, tmp_path / "plain") == 0
    rng = random.Random(1)
    kills = 0
    for _ in range(8):
        with start(corpus, tmp_path / "out") as process:
            wait_for(tmp_path / "out" / "bm25.building" / "index", process)
            time.sleep(rng.uniform(0.1, 2.5))
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
            process.stderr.read()
        psutil.wait_procs(children, timeout=20)
        assert not any(child.is_running() for child in children)
        if (tmp_path / "out" / "bm25").exists():
            break
    assert kills > 0
    assert build(corpus, tmp_path / "out") == 0
    assert os.listdir(tmp_path / "out") == ["bm25"]
    plain = {p.name: p.read_bytes() for p in (tmp_path / "plain" / "bm25").iterdir()}
    killed = {p.name: p.read_bytes() for p in (tmp_path / "out" / "bm25").iterdir()}
    del plain["manifest.json"], killed["manifest.json"]
    assert killed == plain
