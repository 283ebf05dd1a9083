"""Measures search backends on questions: how often the first passages help, and what a search costs.

    python -m data_prep.real_world --files FOLDER --out data/real
    python scripts/eval_retrieval.py data/real                                   bm25, built in memory
    python scripts/eval_retrieval.py data/real --run bm25 --run "lucene --index_path indexes/lucene"
    python scripts/eval_retrieval.py data/real --retriever_url http://127.0.0.1:8000 --json figures.json

    parquet rows -> questions -> each search backend -> documents -> rank of the first that helps -> a table

A passage helps a question that has `extra_info.gold_ids` when it is one of those ("gold passage"), and any
other question when one of its accepted answers stands in it, in whole words, compared as exact match compares
("answer text"; DPR's recall@k). Questions whose only answers are yes, no or an article are left out there.
--run [LABEL=]NAME [FLAGS] is a row of the table, with the server's flags; so is each --retriever_url.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from search_r1.search.client import SearchClient, SearchError  # noqa: E402
from search_r1.search.corpus import Corpus  # noqa: E402
from search_r1.search.launch import (  # noqa: E402
    add_backend_arguments,
    check_backend_arguments,
    open_retriever,
)
from search_r1.search.retriever import RetrievalUnavailable  # noqa: E402
from verl.utils.reward_score.qa_em import normalize_answer  # noqa: E402

GOLD, ANSWER = "gold passage", "answer text"
MRR_DEPTH = 10
BATCH = 64  # queries a call, where throughput is measured
WARM_UP = 16  # searches before the clock starts

Search = Callable[[list[str], int], list[list[str]]]
"""(queries, topk) -> for each query the contents of its documents, best first."""


@dataclass(frozen=True)
class Question:
    """A question with what makes a passage helpful: gold ids, or normalised answers if it has no gold ids."""

    text: str
    gold_ids: frozenset[str]
    answers: tuple[str, ...]

    @property
    def measure(self) -> str:
        return GOLD if self.gold_ids else ANSWER


@dataclass(frozen=True)
class Figures:
    """One row of the table. Latencies in ms, of one query at a time; None: not measured on this machine."""

    backend: str
    measure: str
    num_questions: int
    recall: dict[int, float]
    mrr: float
    p50_ms: float
    p99_ms: float
    queries_per_cpu_second: float | None


def read_questions(paths: Sequence[Path], limit: int | None = None) -> tuple[list[Question], int]:
    """(questions, number of those left out) of parquet files. Raises ValueError for unfit files."""
    questions, num_left_out = [], 0
    for path in paths:
        try:
            frame = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: can't be read as a parquet file ({error})") from None
        missing = {"question", "reward_model"} - set(frame.columns)
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
        for number, row in enumerate(frame.to_dict("records")):
            gold = (row.get("extra_info") or {}).get("gold_ids")
            gold_ids = frozenset(map(str, gold)) if gold is not None else frozenset()
            target = ((row["reward_model"] or {}).get("ground_truth") or {}).get("target")
            answers = {normalize_answer(str(answer)) for answer in (() if target is None else target)}
            if not gold_ids and not answers:
                raise ValueError(f"{path}, row {number}: neither extra_info.gold_ids nor a golden answer")
            if not gold_ids and answers <= {"yes", "no", ""}:
                num_left_out += 1
                continue
            questions.append(Question(row["question"], gold_ids, tuple(sorted(answers - {""}))))
    if not questions:
        raise ValueError(f"found no questions in {', '.join(map(str, paths)) or 'no files'}")
    return questions[:limit], num_left_out


def gold_contents(corpus_path: Path, questions: Sequence[Question]) -> dict[str, str]:
    """The text of each gold passage by id: a server's reply need not have ids. Raises ValueError if one is
    not in the corpus."""
    wanted = set().union(*(question.gold_ids for question in questions))
    contents: dict[str, str] = {}
    if wanted:
        with Corpus.open(corpus_path) as corpus:
            for start in range(0, len(corpus), 10_000):
                for document in corpus.rows(range(start, min(start + 10_000, len(corpus)))):
                    fields = document.fields
                    if str(fields.get("id")) in wanted:
                        contents[str(fields["id"])] = fields["contents"]
    unknown = sorted(wanted - contents.keys())
    if unknown:
        raise ValueError(f"gold_ids name passage {unknown[0]!r}, which {corpus_path} lacks")
    return contents


def first_rank(question: Question, found: Sequence[str], gold: dict[str, str]) -> int:
    """Rank from 1 of the first passage that helps; 0 if none does."""
    texts = {gold[identifier] for identifier in question.gold_ids}
    for rank, contents in enumerate(found, 1):
        if question.gold_ids:
            helps = contents in texts
        else:
            padded = f" {normalize_answer(contents)} "
            helps = any(f" {answer} " in padded for answer in question.answers)
        if helps:
            return rank
    return 0


def measure(
    name: str, search: Search, in_process: bool, questions: Sequence[Question], gold: dict[str, str],
    ks: Sequence[int], num_timed: int,
) -> list[Figures]:  # fmt: skip
    """The rows of one backend, one for each measure that the questions need."""
    topk = max(*ks, MRR_DEPTH)
    texts = [question.text for question in questions]
    search(texts[:WARM_UP], topk)
    started = time.process_time()
    found = [row for i in range(0, len(texts), BATCH) for row in search(texts[i : i + BATCH], topk)]
    cpu_seconds = time.process_time() - started
    times = []
    for text in texts[:num_timed]:
        before = time.perf_counter()
        search([text], topk)
        times.append(1000 * (time.perf_counter() - before))
    ranks = [first_rank(question, row, gold) for question, row in zip(questions, found, strict=True)]
    rows = []
    for kind in (GOLD, ANSWER):
        part = np.array([r for r, q in zip(ranks, questions, strict=True) if q.measure == kind])
        if len(part):
            rows.append(
                Figures(
                    backend=name,
                    measure=kind,
                    num_questions=len(part),
                    recall={k: float(np.mean((part > 0) & (part <= k))) for k in ks},
                    mrr=float(np.mean([1 / r if 0 < r <= MRR_DEPTH else 0.0 for r in part])),
                    p50_ms=float(np.percentile(times, 50)),
                    p99_ms=float(np.percentile(times, 99)),
                    queries_per_cpu_second=len(texts) / max(cpu_seconds, 1e-9) if in_process else None,
                )
            )
    return rows


@contextmanager
def server(url: str) -> Iterator[Search]:
    """Search over HTTP, without the client's memory of earlier answers."""
    with SearchClient(url, cache_size=0) as client:
        yield lambda queries, topk: [
            [document["contents"] for document in row] for row in client.batch_search(queries, topk)
        ]


@contextmanager
def backend(arguments: argparse.Namespace) -> Iterator[Search]:
    """Search in this process, with the backend that the flags ask for."""
    retriever = open_retriever(arguments, lambda line: print(f"  {line}", file=sys.stderr))

    def search(queries: list[str], topk: int) -> list[list[str]]:
        documents, _ = retriever.batch_search(queries, topk)
        return [[document.contents for document in row] for row in documents]

    try:
        yield search
    finally:
        retriever.close()


class RunParser(argparse.ArgumentParser):
    """Flags inside --run: a mistake is a ValueError, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--run: {message}")


def parse_run(run: str, corpus_path: Path) -> tuple[str, argparse.Namespace]:
    """(label, backend's flags) of one --run: "[LABEL=]NAME [FLAGS]". Raises ValueError for wrong ones."""
    words = shlex.split(run)
    label, is_labelled, name = words[0].rpartition("=") if words else ("", "", "")
    if not name or words[0].startswith("-"):
        raise ValueError(f"--run: found {run!r}, expected a retriever's name and then its flags")
    parser = RunParser(prog="--run", add_help=False)
    add_backend_arguments(parser)
    arguments = parser.parse_args(["--retriever_name", name, *words[1:]])
    arguments.corpus_path = arguments.corpus_path or str(corpus_path)
    check_backend_arguments(arguments)
    return label if is_labelled else run, arguments


def table(rows: Sequence[Figures], ks: Sequence[int]) -> str:
    """The figures as text, in columns."""
    header = ["backend", "a hit is", "questions", *(f"recall@{k}" for k in ks), f"MRR@{MRR_DEPTH}"]
    header += ["p50 ms", "p99 ms", "queries/CPU s"]
    lines = [header]
    for row in rows:
        speed = row.queries_per_cpu_second
        cells = [row.backend, row.measure, str(row.num_questions), *(f"{row.recall[k]:.1%}" for k in ks)]
        cells += [f"{row.mrr:.3f}", f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}"]
        lines.append([*cells, "-" if speed is None else f"{speed:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)]
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join("  ".join(cells) for cells in aligned)


def evaluate(options: argparse.Namespace) -> list[Figures]:
    """The table's rows. Raises ValueError, SearchError or RetrievalUnavailable."""
    if min(options.k) < 1:
        raise ValueError(f"--k: found {min(options.k)}, expected 1 or more")
    ks = sorted(set(options.k))
    corpus_path = options.corpus_path or options.folder / "corpus.jsonl"
    runs = [parse_run(run, corpus_path) for run in options.run]
    paths = options.questions or sorted(options.folder.glob("*.parquet"))
    if not paths:
        raise ValueError(f"{options.folder} holds no parquet rows; data_prep.real_world or .squad make some")
    questions, num_left_out = read_questions(paths, options.num_questions)
    note = f", {num_left_out:,} left out that no text answers (yes, no)" if num_left_out else ""
    print(f"{len(questions):,} questions{note}")
    gold = gold_contents(corpus_path, questions)
    rows = []
    for url in options.retriever_url:
        with server(url) as search:
            rows += measure(url, search, False, questions, gold, ks, options.num_timed)
    for label, arguments in runs:
        print(f"{label}:", file=sys.stderr)
        with backend(arguments) as search:
            rows += measure(label, search, True, questions, gold, ks, options.num_timed)
    print(table(rows, ks))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="corpus.jsonl and parquet rows")
    parser.add_argument(
        "--run", action="append", default=[], metavar="'[LABEL=]NAME [FLAGS]'", help="default: bm25"
    )
    parser.add_argument("--retriever_url", "--retriever-url", action="append", default=[], help="a server")
    parser.add_argument("--questions", type=Path, nargs="+", help="parquet files (default: the folder's)")
    parser.add_argument("--corpus_path", type=Path, help="default: the folder's corpus.jsonl")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 10], help="default: 1 3 10")
    parser.add_argument("--num_questions", type=int, help="only so many of the questions")
    parser.add_argument("--num_timed", type=int, default=300, help="questions for the latency (300)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(argv)
    if not options.run and not options.retriever_url:
        options.run = ["bm25"]
    try:
        rows = evaluate(options)
    except (ValueError, SearchError, RetrievalUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
