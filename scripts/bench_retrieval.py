"""Compare this project's BM25 server with one that works as Search-R1's does; print a Markdown table.

    python scripts/bench_retrieval.py --work_folder /tmp/bench --num_passages 200000 1000000

    made-up corpus and its two indexes (kept in the work folder)
        -> both servers up -> for each load, in each round: theirs, then ours -> medians

Theirs (scripts/bench/searchr1_like_server.py) runs with the Python of an environment of its own. Without it
this script ends with the commands that install it. Both search the same corpus: word number r comes up about
as often as 1 / r (Zipf, 10 million words). The first 33 are the words that English analysis drops, all others
are made up of syllables. A larger corpus begins with the smaller one.

Every query is a new one, so no cache helps either side. "Queries per CPU s" divides by CPU seconds of the
server alone, because the clients run on the same cores and disturb the wall clock. OMP_NUM_THREADS is 1 for
both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402

from scripts.bench.load import run_load  # noqa: E402
from scripts.bench.servers import PORT, bm25_server, running  # noqa: E402

THEIRS = "Search-R1-like"
OURS = "ours"
NUM_QUERIES = 200_000
WARM_UP_SECONDS = 15.0
INSTALL = """python -m venv {folder}
{folder}/bin/pip install torch==2.13.0
{folder}/bin/pip install --no-deps pyserini==0.22.1
{folder}/bin/pip install pyjnius faiss-cpu onnxruntime tqdm pandas scikit-learn transformers \\
    sentence-transformers datasets fastapi uvicorn"""
"""The environment of the comparison server; Pyserini 0.22.1 also needs a JDK 11 to 21."""
HEAD = (
    "| clients | queries each | server | queries/s | queries per CPU s | p50 ms | p99 ms | RSS MB |\n"
    "|--:|--:|---|--:|--:|--:|--:|--:|"
)
BLOCK_PASSAGES = 10_000
NUM_WORDS = 10_000_000
MIN_LENGTH = 80  # words of a passage
MAX_LENGTH = 120
FREQUENT_WORD_TEXT = """
the of and to in a is for it as was with that be on by at are this an not or but they will if such their there
then no into these
"""
FREQUENT_WORDS = FREQUENT_WORD_TEXT.split()
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrtvwxyz" for vowel in "aeiou"]


@lru_cache(maxsize=1_000_000)
def word(rank: int) -> str:
    """Return a word by its number, counted from 0."""
    if rank < len(FREQUENT_WORDS):
        return FREQUENT_WORDS[rank]
    text = ""
    while not text or rank:
        rank, index = divmod(rank, 100)
        text += SYLLABLES[index]
    return text


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw `count` word numbers, Zipf with exponent 1, counted from 0."""
    return np.exp(rng.random(count) * np.log(NUM_WORDS)).astype(np.int64) - 1


def block(number: int) -> list[np.ndarray]:
    """Return the passages of a block, as word numbers."""
    rng = np.random.default_rng([0, number])
    bounds = np.cumsum(rng.integers(MIN_LENGTH, MAX_LENGTH + 1, BLOCK_PASSAGES))
    return np.split(draw(rng, int(bounds[-1])), bounds[:-1])


def write_corpus(path: Path, num_passages: int) -> None:
    """Write the corpus to `path` in one move, so that a file of that name is complete.

    A passage has 620 bytes.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="ascii") as file:
        for start in range(0, num_passages, BLOCK_PASSAGES):
            passages = block(start // BLOCK_PASSAGES)[: num_passages - start]
            for number, ranks in enumerate(passages, start):
                words = [word(rank) for rank in ranks.tolist()]
                title = " ".join(words[:2]).title()
                file.write(f'{{"id": "{number}", "contents": "\\"{title}\\"\\n{" ".join(words)}."}}\n')
    partial.rename(path)


def make_queries(num: int) -> list[str]:
    """Return `num` questions about the corpus, each about another passage, from the first on.

    A question has 3 to 6 words of its passage and 1 to 4 words from anywhere, frequent ones as in the text.
    """
    rng = np.random.default_rng([0, 2**32])
    queries: list[str] = []
    for start in range(0, num, BLOCK_PASSAGES):
        passages = block(start // BLOCK_PASSAGES)
        for row in rng.permutation(BLOCK_PASSAGES)[: num - start]:
            passage_words = rng.choice(passages[row], rng.integers(3, 7), replace=False)
            chosen = rng.permutation(np.concatenate([passage_words, draw(rng, int(rng.integers(1, 5)))]))
            queries.append(" ".join(word(rank) for rank in chosen.tolist()))
    return queries


def run_command(command: list[str], log_path: Path) -> None:
    with log_path.open("wb") as log:
        status = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT).returncode
    if status:
        end = log_path.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {status}\n{end}")


def make_files(work: Path, num_passages: int, comparison_python: Path) -> dict[str, Path]:
    """Make corpus, questions and both indexes; those that exist already are used again."""
    files = {
        "corpus": work / f"corpus_{num_passages}.jsonl",
        "queries": work / f"queries_{num_passages}.txt",
        "lucene": work / f"lucene_{num_passages}",
        "bm25": work / f"ours_{num_passages}" / "bm25",
    }
    if not files["corpus"].is_file():
        write_corpus(files["corpus"], num_passages)
    if not files["queries"].is_file():
        files["queries"].write_text("\n".join(make_queries(min(NUM_QUERIES, num_passages))))
    if not files["lucene"].is_dir():  # it is built as Search-R1 does: one thread, documents not stored
        source = work / f"lucene_input_{num_passages}"
        partial = work / f"lucene_{num_passages}.building"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        (source / "corpus.jsonl").symlink_to(files["corpus"])
        command = [str(comparison_python), "-m", "pyserini.index.lucene", "--collection", "JsonCollection"]
        command += ["--input", str(source), "--index", str(partial), "--threads", "1"]
        run_command([*command, "--generator", "DefaultLuceneDocumentGenerator"], work / "lucene.log")
        partial.rename(files["lucene"])
    if not files["bm25"].is_dir():
        command = [sys.executable, "-m", "search_r1.search.index_builder", "--retrieval_method", "bm25"]
        command += ["--corpus_path", str(files["corpus"]), "--save_dir", str(files["bm25"].parent)]
        run_command(command, work / "ours.log")
    return files


def server_commands(files: dict[str, Path], work: Path, comparison_python: Path) -> dict[str, list[str]]:
    script = ROOT / "scripts" / "bench" / "searchr1_like_server.py"
    theirs = [str(comparison_python), str(script), "--port", PORT, "--corpus", str(files["corpus"])]
    theirs += ["--index", str(files["lucene"]), "--cache", str(work / "arrow")]
    return {THEIRS: theirs, OURS: bm25_server(files["corpus"], "--index_path", str(files["bm25"]))}


def compare(
    servers: dict[str, tuple[int, int]], queries: Path, process: Executor, options: argparse.Namespace
) -> dict[tuple[int, int], dict[str, list[dict[str, float]]]]:
    """Return (clients, queries per request) -> server -> what run_load returns, once for each round.

    Args:
        servers: name -> (port, process id). Both get the same queries, and never one that was asked before.
        queries: file of the queries.
        process: an executor with one process, other than this one, for the clients.
        options: the command's options.
    """
    num_asked = 0

    def in_turns(clients: int, each: int, seconds: float) -> dict[str, dict[str, float]]:
        nonlocal num_asked
        results = {}
        for name, server in servers.items():
            load = (server, clients, each, options.topk, queries, num_asked, seconds)
            results[name] = process.submit(run_load, *load).result()
        num_asked += int(max(result["queries"] for result in results.values()))
        return results

    in_turns(max(options.clients), 1, WARM_UP_SECONDS)
    loads = [
        (clients, num_queries) for num_queries in options.queries_per_request for clients in options.clients
    ]
    results: dict[tuple[int, int], dict[str, list[dict[str, float]]]] = {
        load: {name: [] for name in servers} for load in loads
    }
    for number in range(options.rounds):
        for clients, num_queries in loads:
            for name, result in in_turns(clients, num_queries, options.seconds).items():
                results[clients, num_queries][name].append(result)
                print(f"round {number + 1}, {clients} x {num_queries}, {name}: {result}", file=sys.stderr)
    return results


def table(results: dict[tuple[int, int], dict[str, list[dict[str, float]]]]) -> str:
    """Return medians over the rounds in Markdown.

    Our figures are followed by their ratio to the other server's.
    """
    lines = [HEAD]
    for (clients, num_queries), rounds in results.items():
        for name in rounds:
            cells = [str(clients), str(num_queries), name]
            for field in ("queries_per_s", "queries_per_cpu_s", "p50_ms", "p99_ms", "rss_mb"):
                value, their_value = (median(run[field] for run in rounds[n]) for n in (name, THEIRS))
                ratio = f" ({value / their_value:.2g}x)" if name == OURS else ""
                cells.append(f"{value:.{1 if value < 100 else 0}f}{ratio}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work_folder", type=Path, required=True, help="corpora, indexes and logs; kept")
    parser.add_argument("--comparison_python", type=Path, help="default: <work_folder>/venv/bin/python")
    parser.add_argument("--num_passages", type=int, nargs="+", default=[200_000, 1_000_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--queries_per_request", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run (default: 5)")
    options = parser.parse_args()
    work = options.work_folder.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = options.comparison_python or work / "venv" / "bin" / "python"
    if not python.is_file():
        commands = INSTALL.format(folder=python.parent.parent)
        parser.error(f"there is no {python}: the comparison server has its own Python\n{commands}")
    for num_passages in options.num_passages:
        files = make_files(work, num_passages, python)
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(running(command, work / f"server_{name}.log"))
                for name, command in server_commands(files, work, python).items()
            }
            process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            results = compare(servers, files["queries"], process, options)
        print(
            f"\n### BM25, {num_passages:,} passages, {os.cpu_count()} cores\n\n{table(results)}", flush=True
        )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # exiting stops the servers
    sys.exit(main())
