"""Ask running retrieval servers questions with known answers: recall and latency of each, and a status.

    python scripts/try_retrieval.py data/squad/test.parquet -n 200 --url http://a:8000/retrieve,http://b:8000

    rows -> questions -> each server, one question at a time, then all at once -> a table

A question counts at k if one of its first k passages helps: its id is among the question's
`extra_info.gold_ids`, or, for rows without them, one of its answers stands in it. The exit status is 0; 1 if
a server failed, if servers serve different corpora, or if recall at the largest k is below --min_recall; and
2 for wrong arguments. scripts/slurm/retriever.sbatch runs it on a cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import httpx  # noqa: E402
import numpy as np  # noqa: E402

from search_r1.search.client import API_KEY_VARIABLE, parse_urls  # noqa: E402
from search_r1.search.probe import RetrievalProbe  # noqa: E402
from verl.data.rl_dataset import read_rows  # noqa: E402
from verl.utils.rows import truth_struct  # noqa: E402
from verl.utils.text import printable  # noqa: E402

WARM_UP = 3  # searches before the clock starts
COLUMNS = ("question", "prompt", "golden_answers", "reward_model", "extra_info")


@dataclass(frozen=True)
class KnownQuestion:
    """A question, the ids of the passages that help, and its answers in lower case."""

    text: str
    gold_ids: frozenset[str]
    answers: tuple[str, ...]

    def is_helped_by(self, document: Any) -> bool:
        """Return whether a passage helps, as servers of Search-R1's interface return it."""
        if not isinstance(document, dict):
            return False
        if self.gold_ids:
            return str(document.get("id")) in self.gold_ids
        contents = str(document.get("contents", "")).lower()
        return any(answer in contents for answer in self.answers)


def read_questions(file: Path, count: int) -> list[KnownQuestion]:
    """Return `count` questions from all over a file of rows, or all if it has fewer.

    Raises ValueError if the file can't be read, or if no row has a question with an answer.
    """
    questions = []
    for _, row in read_rows(str(file), lambda columns, where: None, COLUMNS):
        extra = row.get("extra_info") or {}
        text = row.get("question") or extra.get("question")
        truth = truth_struct((row.get("reward_model") or {}).get("ground_truth")) or {}
        answers = row.get("golden_answers")
        if answers is None:
            answers = truth.get("target")
        if answers is None:
            answers = []
        if isinstance(answers, str):
            answers = [answers]
        gold_ids = extra.get("gold_ids")
        ids = frozenset(map(str, gold_ids if gold_ids is not None else ()))
        if text and (ids or len(answers)):
            questions.append(KnownQuestion(str(text), ids, tuple(str(answer).lower() for answer in answers)))
    if not questions:
        raise ValueError(
            f"Found no row in {file} with a question and extra_info.gold_ids or golden_answers; expected "
            "rows such as `search-r1 squad` makes."
        )
    indices = np.linspace(0, len(questions) - 1, min(count, len(questions))).astype(int)
    return [questions[index] for index in indices]


@dataclass(frozen=True)
class Trial:
    """The figures of a server.

    Attributes:
        recalls: the recall at each k.
        milliseconds: of each search of a single question.
        rate: questions a second, all asked at once.
    """

    recalls: list[float]
    milliseconds: np.ndarray
    rate: float


def try_server(url: str, questions: Sequence[KnownQuestion], ks: Sequence[int], timeout: float) -> Trial:
    """Ask a server all questions. Raises httpx.HTTPError, ValueError, KeyError or TypeError if it fails."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, timeout=timeout, headers=headers) as client:

        def search(texts: Sequence[str]) -> list[list[Any]]:
            body = {"queries": list(texts), "topk": max(ks), "return_scores": True}
            result = client.post(url, json=body).raise_for_status().json()["result"]
            if len(result) != len(texts):
                raise ValueError(f"{len(result)} results for {len(texts)} queries")
            return [[hit["document"] for hit in hits] for hits in result]

        for question in questions[:WARM_UP]:
            search([question.text])
        milliseconds = []
        ranks = []
        for question in questions:
            before = time.perf_counter()
            [documents] = search([question.text])
            milliseconds.append(1000 * (time.perf_counter() - before))
            hits = (rank for rank, document in enumerate(documents, 1) if question.is_helped_by(document))
            ranks.append(next(hits, np.inf))
        before = time.perf_counter()
        search([question.text for question in questions])
        rate = len(questions) / (time.perf_counter() - before)
    recalls = [float(np.mean(np.array(ranks) <= k)) for k in ks]
    return Trial(recalls, np.array(milliseconds), rate)


def corpora_differ(urls: Sequence[str], timeout: float) -> bool:
    """Return whether servers say that they serve different corpora; those that do not say it are left out."""
    states = RetrievalProbe().servers(urls, 1, timeout, False)
    corpora = [state.corpus for state in states if state.corpus is not None]
    known = {(corpus["num_bytes"], corpus["sample_sha256"]) for corpus in corpora}
    return len(known) > 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("questions", type=Path, help="rows, .parquet or .jsonl")
    add("--url", default="http://127.0.0.1:8000/retrieve", help="servers, a,b (%(default)s)")
    add("-n", type=int, default=200, help="questions (%(default)s)")
    add("--topk", default="1,3,10", help="the k of recall@k (%(default)s)")
    add("--timeout", type=float, default=60.0, help="seconds of a request (60)")
    add("--min_recall", type=float, default=0.0, help="a smaller recall at the largest k is a failure (0)")
    options = parser.parse_args(argv)
    try:
        ks = sorted({int(k) for k in options.topk.split(",")})
        urls = parse_urls(options.url)
        if options.n < 1 or ks[0] < 1:
            raise ValueError(
                f"Found -n {options.n} and --topk {options.topk}; expected numbers of 1 or more."
            )
        questions = read_questions(options.questions, options.n)
        if corpora_differ(urls, options.timeout):
            print(
                "error: the servers serve different corpora; expected one (/health says which)",
                file=sys.stderr,
            )
            return 1
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    status = 0
    header = ["server", "questions", *(f"recall@{k}" for k in ks), "p50 ms", "p99 ms", "questions/s"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for url in urls:
        try:
            trial = try_server(url, questions, ks, options.timeout)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            print(f"error: {url}: {printable(error)}", file=sys.stderr)
            status = 1
            continue
        shares = " | ".join(f"{recall:.1%}" for recall in trial.recalls)
        p50, p99 = np.percentile(trial.milliseconds, [50, 99])
        print(
            f"| {url} | {len(questions)} | {shares} | {p50:.2f} | {p99:.2f} | {trial.rate:.0f} |", flush=True
        )
        if trial.recalls[-1] < options.min_recall:
            recall = f"{trial.recalls[-1]:.1%}"
            print(
                f"error: {url}: recall@{ks[-1]} is {recall}, below --min_recall {options.min_recall}",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
