"""Compare this project's BM25 with bm25s: queries per CPU second, in one process, by turns.

    pip install bm25s PyStemmer
    python scripts/bench_bm25s.py --data DATA --work_folder /tmp/bench

    real passages -> 200,000 new ones of their sentences -> both indexes (kept in the work folder)
        -> for each load: a batch of 64 queries for bm25s, the same batch for ours, again and again -> medians

DATA holds xquad.en.json, 2wikimultihopqa_corpus.json, NQ-open.dev.jsonl and hotpot_dev_v1_simplified.json. A
passage of the corpus is 3 to 7 sentences of them, drawn with replacement, so words are as frequent as in real
text and no two passages are alike.

bm25s computes in numba, its fastest way (the numpy way is timed as well), with one thread, its English stop
words, PyStemmer's stems and the k1 and b of ours. It gives rows and scores. Ours gives the documents, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import bm25s  # noqa: E402
import Stemmer  # noqa: E402

from search_r1.search.bm25 import BM25Retriever  # noqa: E402
from search_r1.search.bm25.index import K1, B  # noqa: E402
from search_r1.search.corpus import Corpus  # noqa: E402

BATCH = 64
TOPK = 3
FREQUENT_RANKS = 200  # the words that are in most passages


def read_passages(data: Path) -> list[tuple[str, str]]:
    """Return (title, text) of all passages."""
    passages = []
    for article in json.loads((data / "xquad.en.json").read_text(encoding="utf-8"))["data"]:
        title = article["title"].replace("_", " ")
        passages += [(title, paragraph["context"]) for paragraph in article["paragraphs"]]
    wiki = json.loads((data / "2wikimultihopqa_corpus.json").read_text(encoding="utf-8"))
    return passages + [(passage["title"], passage["text"]) for passage in wiki]


def read_questions(data: Path) -> dict[str, list[str]]:
    """Return the questions of each set, shuffled."""
    xquad = json.loads((data / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    hotpot = json.loads((data / "hotpot_dev_v1_simplified.json").read_text(encoding="utf-8"))
    lines = (data / "NQ-open.dev.jsonl").read_text(encoding="utf-8").splitlines()
    questions = {
        "NQ": [json.loads(line)["question"] for line in lines],
        "HotpotQA": [row["question"] for row in hotpot],
        "XQuAD": [
            qa["question"]
            for article in xquad
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ],
    }
    for rows in questions.values():
        random.Random(0).shuffle(rows)
    return questions


def write_corpus(path: Path, passages: list[tuple[str, str]], num_passages: int) -> None:
    """Write the corpus to `path` in one move, so that a file of that name is complete."""
    rng = random.Random(0)
    sentences = [sentence for _, text in passages for sentence in re.split(r"(?<=[.!?]) +", text) if sentence]
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in range(num_passages):
            title = rng.choice(passages)[0]
            text = " ".join(rng.choices(sentences, k=rng.randint(3, 7)))
            file.write(json.dumps({"id": str(row), "contents": f'"{title}"\n{text}'}) + "\n")
    partial.rename(path)


def frequent_queries(retriever: BM25Retriever, passages: list[tuple[str, str]], count: int) -> list[str]:
    """Return queries of 2 to 5 of the most frequent words that are no stop words."""
    rng = random.Random(0)
    numbers: dict[int, str] = {}
    for _, text in passages:
        for word in re.findall(r"[a-z]{3,}", text):
            for number in retriever._query_terms(word):
                numbers.setdefault(number, word)
    starts = retriever._index.posting_starts
    by_frequency = sorted(numbers, key=lambda number: int(starts[number] - starts[number + 1]))
    words = [numbers[number] for number in by_frequency[:FREQUENT_RANKS]]
    return [" ".join(rng.sample(words, rng.randint(2, 5))) for _ in range(count)]


def open_ours(corpus_path: Path, folder: Path) -> BM25Retriever:
    """Open our index of the corpus in `folder`, which is built if it is not there."""
    if not (folder / "bm25").is_dir():
        command = [sys.executable, "-m", "search_r1.search.index_builder", "--retrieval_method", "bm25"]
        command += ["--corpus_path", str(corpus_path), "--save_dir", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT)
    return BM25Retriever(Corpus.open(corpus_path), folder / "bm25")


def open_theirs(corpus_path: Path, folder: Path, stemmer: Stemmer.Stemmer) -> bm25s.BM25:
    """Open the index of bm25s in `folder`, which is built if it is not there."""
    if not folder.is_dir():
        with corpus_path.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["contents"] for line in lines]
        tokens = bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)
        retriever = bm25s.BM25(method="lucene", k1=K1, b=B)
        retriever.index(tokens, show_progress=False)
        retriever.save(folder)
    return bm25s.BM25.load(folder)


def ask_theirs(
    retriever: bm25s.BM25, stemmer: Stemmer.Stemmer, backend: str
) -> Callable[[list[str]], object]:
    def ask(queries: list[str]) -> object:
        tokens = bm25s.tokenize(
            queries, stopwords="en", stemmer=stemmer, show_progress=False, return_ids=False
        )
        return retriever.retrieve(tokens, k=TOPK, show_progress=False, n_threads=1, backend_selection=backend)

    return ask


def milliseconds(ask: Callable[[list[str]], object], queries: list[str]) -> float:
    """Return the CPU milliseconds that a query of the batch takes."""
    start = time.process_time()
    ask(queries)
    return (time.process_time() - start) * 1000 / len(queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work_folder", type=Path, required=True, help="corpus and indexes; kept")
    parser.add_argument("--num_passages", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=15, help="of each load (default: 15)")
    options = parser.parse_args()
    work = options.work_folder.resolve()
    work.mkdir(parents=True, exist_ok=True)
    passages = read_passages(options.data)
    corpus_path = work / f"natural_{options.num_passages}.jsonl"
    if not corpus_path.is_file():
        write_corpus(corpus_path, passages, options.num_passages)
    ours = open_ours(corpus_path, work / f"natural_ours_{options.num_passages}")
    stemmer = Stemmer.Stemmer("english")
    theirs = open_theirs(corpus_path, work / f"natural_bm25s_{options.num_passages}", stemmer)
    count = BATCH * options.batches
    loads = read_questions(options.data)
    loads["frequent words"] = frequent_queries(ours, passages, count)
    contenders = {
        "bm25s, numba": ask_theirs(theirs, stemmer, "numba"),
        "bm25s, numpy": ask_theirs(theirs, stemmer, "numpy"),
        "ours": lambda queries: ours.batch_search(queries, TOPK),
    }
    print("| queries | server | CPU ms a query | queries per CPU s | ours is |\n|---|---|--:|--:|--:|")
    for load, queries in loads.items():
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for ask in contenders.values():
            ask(queries[-BATCH:])
        for start in range(0, min(count, len(queries) - BATCH), BATCH):
            for name, ask in contenders.items():
                times[name].append(milliseconds(ask, queries[start : start + BATCH]))
        ours_ms = median(times["ours"])
        for name, values in times.items():
            ratio = f"{median(values) / ours_ms:.2f} x" if name != "ours" else ""
            print(
                f"| {load} | {name} | {median(values):.3f} | {1000 / median(values):,.0f} | {ratio} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
