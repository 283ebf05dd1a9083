"""Prints how often a search for a question itself finds the passage that the question was asked about.

    python -m data_prep.squad --squad xquad.en.json --passages more.json --out data/mine
    python scripts/eval_retrieval.py data/mine

The folder holds corpus.jsonl and parquet rows with `extra_info.gold_ids`, as data_prep/squad.py writes them.
A question counts at k when one of its gold passages is among the first k. Searches in this process with the
server's BM25, or over HTTP with --retriever-url.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from search_r1.search.bm25 import BM25Retriever  # noqa: E402
from search_r1.search.client import SearchClient, SearchError  # noqa: E402
from search_r1.search.corpus import read_corpus  # noqa: E402


def read_questions(folder: Path) -> list[tuple[str, set[str]]]:
    """(question, ids of its gold passages) of all parquet files. Raises ValueError where there are none."""
    questions = []
    for path in sorted(folder.glob("*.parquet")):
        frame = pd.read_parquet(path)
        missing = {"question", "extra_info"} - set(frame.columns)
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
        for number, (question, extra) in enumerate(zip(frame.question, frame.extra_info, strict=True)):
            gold = (extra or {}).get("gold_ids")
            if gold is None or len(gold) == 0:
                raise ValueError(f"{path}, row {number}: no extra_info.gold_ids, expected passage ids")
            questions.append((question, {str(identifier) for identifier in gold}))
    if not questions:
        raise ValueError(f"{folder} holds no parquet rows; make them with `python -m data_prep.squad`")
    return questions


def found_contents(folder: Path, questions: list[str], topk: int, url: str | None) -> list[list[str]]:
    """The contents of the first `topk` passages for each question, best first."""
    if url is not None:
        with SearchClient(url, topk=topk) as client:
            return [[found["contents"] for found in row] for row in client.batch_search(questions)]
    documents, _ = BM25Retriever(read_corpus(folder / "corpus.jsonl")).batch_search(questions, topk)
    return [[str(document["contents"]) for document in row] for row in documents]


def recall_table(
    folder: Path, ks: Sequence[int] = (1, 3, 10), url: str | None = None
) -> tuple[int, int, dict[int, float]]:
    """(number of passages, of questions, {k: share of questions with a gold passage in the first k})."""
    questions = read_questions(folder)
    contents = {str(row.get("id")): str(row["contents"]) for row in read_corpus(folder / "corpus.jsonl")}
    unknown = sorted(set().union(*(gold for _, gold in questions)) - contents.keys())
    if unknown:
        raise ValueError(f"{folder}: gold_ids name passage {unknown[0]!r}, which corpus.jsonl lacks")
    found = found_contents(folder, [question for question, _ in questions], max(ks), url)
    hits = dict.fromkeys(ks, 0)
    for row, (_, gold) in zip(found, questions, strict=True):
        wanted = {contents[identifier] for identifier in gold}  # the texts: a reply need not have ids
        for k in ks:
            hits[k] += not wanted.isdisjoint(row[:k])
    return len(contents), len(questions), {k: count / len(questions) for k, count in hits.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="corpus.jsonl and parquet rows with extra_info.gold_ids")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 10], help="default: 1 3 10")
    parser.add_argument("--retriever-url", help="ask this server instead of searching in this process")
    options = parser.parse_args(argv)
    try:
        if min(options.k) < 1:
            raise ValueError(f"--k: found {min(options.k)}, expected 1 or more")
        num_passages, num_questions, recall = recall_table(options.folder, options.k, options.retriever_url)
    except (ValueError, SearchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{num_questions} questions, {num_passages} passages")
    print("\n".join(f"gold passage in the first {k:>3}: {share:6.1%}" for k, share in recall.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
