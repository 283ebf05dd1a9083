"""Measure search backends on questions: how often the first passages help, and what a search costs.

    search-r1 squad --squad xquad.en.json --passages 2wikimultihopqa_corpus.json --out data/real
    python scripts/eval_retrieval.py data/real                                   bm25, built in memory
    python scripts/eval_retrieval.py data/real --run bm25 --run "lucene --index_path indexes/lucene"

    parquet rows -> questions -> each search backend -> documents -> rank of the first that helps -> a table

A passage helps a question if its id is among the question's `extra_info.gold_ids`. Each --run NAME [FLAGS] is
a row of the table, with the server's flags.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from search_r1.search.launch import (  # noqa: E402
    add_backend_arguments,
    check_backend_arguments,
    open_retriever,
)
from search_r1.search.search_backend import RetrievalUnavailable  # noqa: E402
from verl.utils.text import printable  # noqa: E402

KS = (1, 3, 10)  # the k of recall@k; the last one is also the depth of MRR
BATCH = 64  # queries a call when throughput is measured
WARM_UP = 16  # searches before the clock starts
NUM_TIMED = 300  # questions for the latency
HEADER = ["backend", "questions", *(f"recall@{k}" for k in KS), f"MRR@{KS[-1]}"]
HEADER += ["p50 ms", "p99 ms", "queries/CPU s"]


def read_questions(folder: Path) -> list[tuple[str, set[str]]]:
    """Return (question, its gold ids) of all parquet files in a folder.

    Raises ValueError for unfit files, or if there are none.
    """
    questions: list[tuple[str, set[str]]] = []
    for path in sorted(folder.glob("*.parquet")):
        try:
            frame = pd.read_parquet(path, columns=["question", "extra_info"])
            ids = [set(map(str, extra["gold_ids"])) for extra in frame["extra_info"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: expected rows with a question and extra_info.gold_ids ({error})"
            ) from None
        questions += zip(frame["question"], ids, strict=True)
    if not questions:
        raise ValueError(f"{folder} holds no parquet rows; search-r1 squad makes some")
    return questions


class RunParser(argparse.ArgumentParser):
    """A parser of the flags inside --run, for which a mistake is a ValueError, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--run: {message}")


def parse_run(run: str, corpus_path: Path) -> argparse.Namespace:
    """Return the backend's flags of one --run. Raises ValueError for wrong ones."""
    parser = RunParser(prog="--run", add_help=False)
    add_backend_arguments(parser)
    arguments = parser.parse_args(["--retriever_name", *shlex.split(run)])
    arguments.corpus_path = arguments.corpus_path or str(corpus_path)
    check_backend_arguments(arguments)
    return arguments


def measure(retriever: Any, questions: list[tuple[str, set[str]]]) -> list[float]:
    """Return a row of the table after its name. Latencies are those of one query at a time."""
    texts = [text for text, _ in questions]
    retriever.batch_search(texts[:WARM_UP], KS[-1])
    started = time.process_time()
    documents = []
    for start in range(0, len(texts), BATCH):
        documents += retriever.batch_search(texts[start : start + BATCH], KS[-1])[0]
    cpu_seconds = time.process_time() - started
    times = []
    for text in texts[:NUM_TIMED]:
        before = time.perf_counter()
        retriever.batch_search([text], KS[-1])
        times.append(1000 * (time.perf_counter() - before))
    ranks = np.full(len(texts), np.inf)  # counted from 1; inf stands for no gold passage
    for number, ((_, gold), row) in enumerate(zip(questions, documents, strict=True)):
        hits = [rank for rank, document in enumerate(row, 1) if str(document.fields.get("id")) in gold]
        ranks[number] = min(hits, default=np.inf)
    recalls = [float(np.mean(ranks <= k)) for k in KS]
    latencies = [float(np.percentile(times, share)) for share in (50, 99)]
    return [len(texts), *recalls, float(np.mean(1 / ranks)), *latencies, len(texts) / max(cpu_seconds, 1e-9)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="corpus.jsonl and parquet rows")
    parser.add_argument("--run", action="append", metavar="'NAME [FLAGS]'", help="default: bm25")
    options = parser.parse_args(argv)
    try:
        runs = {run: parse_run(run, options.folder / "corpus.jsonl") for run in options.run or ["bm25"]}
        questions = read_questions(options.folder)
        print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
        for run, arguments in runs.items():
            retriever = open_retriever(arguments, lambda line: print(f"  {line}", file=sys.stderr))
            try:
                count, *recalls, mrr, p50, p99, speed = measure(retriever, questions)
            finally:
                retriever.close()
            shares = " | ".join(f"{recall:.1%}" for recall in recalls)
            print(f"| {run} | {count} | {shares} | {mrr:.3f} | {p50:.2f} | {p99:.2f} | {speed:.0f} |")
    except (ValueError, RetrievalUnavailable) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
