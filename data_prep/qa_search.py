"""Search-R1's training and test sets: question sets merged into train.parquet and test.parquet.

    python -m data_prep.qa_search                   both files, from the FlashRAG collection on the hub
    python -m data_prep.qa_search --raw_dir raw     the same from files on disk, FlashRAG's or the authors'
    python -m data_prep.qa_search --split test --data_sources nq,hotpotqa --local_dir data/small

    source names -> file of the split -> questions -> rows in Search-R1's schema -> one parquet file

Training: nq and hotpotqa. Test: nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique and bamboogle; a
source without a test split gives its development set, or else its training set. `extra_info.index` counts
over the whole file, and `id` has the source in it, so that neither is ever repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data_prep.files import make_row, write_parquet
from data_prep.hub import fetch_file
from data_prep.prompts import (
    MICROWORLD_PROMPT,
    NO_SEARCH_PROMPT,
    RAG_PROMPT,
    SEARCH_PROMPT,
    fill_prompt,
    format_passages,
    read_template,
)
from data_prep.qa_sources import SOURCES, Questions, find_file, read_questions
from verl.utils.reward_score.qa_em import normalize_answer

DEFAULT_SOURCES = {
    "train": ["nq", "hotpotqa"],
    "test": ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"],
}
SPLITS_TO_TRY = {"train": ("train",), "test": ("test", "dev", "train")}
TEMPLATES = {
    "base": SEARCH_PROMPT,
    "no_search": NO_SEARCH_PROMPT,
    "rag": RAG_PROMPT,
    "short": MICROWORLD_PROMPT,
}
RAG_BATCH = 256  # questions per request
REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
TEMPLATE_HELP = "file with the prompt in your own words; {question} stands for the question"

Report = Callable[[str], None]


def locate(source: str, split: str, raw_dir: Path | None) -> tuple[str, Path]:
    """(split that was found, its file) for a source, from a folder or from the hub.

    Raises ValueError where there is none, with the names that are looked for.
    """
    for name in SPLITS_TO_TRY[split]:
        if raw_dir is not None:
            path = find_file(source, name, raw_dir)
        else:
            path = fetch_file(REPOSITORY, f"{source}/{name}.jsonl", "or put the files in a folder: --raw_dir")
        if path is not None:
            return name, path
    tried = SPLITS_TO_TRY[split]
    if raw_dir is None:
        raise ValueError(f"{source} has no {' or '.join(tried)} split in {REPOSITORY}")
    names = [f"{source}/{name}.jsonl" for name in tried]
    names += [file for name in tried for file in SOURCES[source].files.get(name, ())]
    raise ValueError(
        f"{raw_dir}: found no {' or '.join(tried)} file of {source}. Looked for {', '.join(names)} there and "
        f"in {source}/, also as .gz or .bz2"
    )


def tidy_question(question: str) -> str:
    """As in Search-R1's rows: without blanks around it, and with a question mark."""
    question = question.strip()
    return question if question.endswith("?") else question + "?"


def merge(sources: Iterable[tuple[str, Questions]], split: str) -> list[dict[str, Any]]:
    """Rows of all sources one after the other, without a prompt; `index` and `id` are unique among them."""
    rows: list[dict[str, Any]] = []
    taken: set[str] = set()
    for source, read in sources:
        for number, question in enumerate(read.questions):
            identifier = unique_id(f"{source}_{question.source_id or f'{split}_{number}'}", taken)
            row = make_row(source, "", tidy_question(question.question), question.answers, split, len(rows))
            # `source_id` also keeps the column from being an object without fields, which parquet can't hold.
            row["metadata"] = {"source_id": question.source_id, **question.metadata}
            row["id"] = identifier
            rows.append(row)
    return rows


def unique_id(wanted: str, taken: set[str]) -> str:
    """`wanted`, or with #2, #3, ... after it if it is taken; the result is added to `taken`."""
    identifier, number = wanted, 1
    while identifier in taken:
        number += 1
        identifier = f"{wanted}#{number}"
    taken.add(identifier)
    return identifier


def add_prompts(rows: list[dict[str, Any]], template: str, passages: list[str] | None = None) -> None:
    """Fills in the prompt of every row, with its passages where the template has a place for them."""
    before, marker, after = template.partition("{passages}")
    for number, row in enumerate(rows):
        # The passages last: a question may have braces in it.
        text = fill_prompt(before, row["question"])
        if marker:
            assert passages is not None
            text += passages[number] + after
        row["prompt"] = [{"role": "user", "content": text}]


def _search(rows: list[dict[str, Any]], url: str, topk: int) -> list[str]:
    """The passages of each row's question, as the server at `url` finds them."""
    from search_r1.search.client import SearchClient, SearchError

    texts = []
    with SearchClient(url, topk=topk) as client:
        for start in range(0, len(rows), RAG_BATCH):
            batch = [row["question"] for row in rows[start : start + RAG_BATCH]]
            try:
                results = client.batch_search(batch)
            except SearchError as error:
                raise ValueError(f"--retriever_url: {error}") from None
            for found in results:
                parts = [document["contents"].partition("\n") for document in found]
                texts.append(format_passages([(title, text) for title, _, text in parts]))
    return texts


def without_overlap(rows: list[dict[str, Any]], others: Iterable[str]) -> list[dict[str, Any]]:
    """The rows whose question is not among the other questions, numbered anew.

    Compared as exact match compares answers: case, punctuation and articles don't count.
    """
    known = {normalize_answer(question) for question in others}
    kept = [row for row in rows if normalize_answer(row["question"]) not in known]
    return [{**row, "extra_info": {**row["extra_info"], "index": i}} for i, row in enumerate(kept)]


def read_split(split: str, names: list[str], raw_dir: Path | None, report: Report) -> list[dict[str, Any]]:
    """The merged rows of a split; `report` gets what was read and what was left out, with places."""
    sources = []
    for source in names:
        used, path = locate(source, split, raw_dir)
        read = read_questions(source, path)
        sources.append((source, read))
        report(f"{split}: {source}: {len(read.questions):,} questions from {path} ({used})")
        if read.num_without_answer:
            report(f"  {read.num_without_answer:,} without an accepted answer left out")
        if read.num_malformed:
            report(f"  {read.num_malformed:,} malformed records left out, the first of them:")
            for problem in read.problems:
                report(f"    {problem}")
    return merge(sources, split)


def _report_overlap(
    rows: list[dict[str, Any]], test: list[str], drop: bool, report: Report
) -> list[dict[str, Any]]:
    """The training rows to write: without the test set's questions if `drop`."""
    if not test:
        report("train: not compared with a test set, because there is none yet")
        return rows
    kept = without_overlap(rows, test)
    done = "left out" if drop else "stay in; --drop_overlap leaves them out"
    report(f"train: {len(rows) - len(kept):,} questions that the test set asks too ({done})")
    return kept if drop else rows


def _existing_questions(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=["question"])["question"].to_pylist() if path.is_file() else []


def prepare(options: argparse.Namespace, report: Report = print) -> None:
    """Writes the parquet files that the command line asks for. Raises ValueError for bad options or files."""
    sets = _sets(options)
    if options.drop_overlap and "train" not in sets:
        raise ValueError(
            "--drop_overlap takes questions out of the training set: it needs --split train or all"
        )
    template = read_template(options.template) if options.template else TEMPLATES[options.template_type]
    if "{passages}" in template and options.retriever_url is None:
        raise ValueError("--template_type rag needs --retriever_url: the passages are searched there")
    rows = {split: read_split(split, names, options.raw_dir, report) for split, names in sets.items()}
    if "train" in rows:
        test_file = options.local_dir / "test.parquet"
        test = [row["question"] for row in rows["test"]] if "test" in rows else _existing_questions(test_file)
        rows["train"] = _report_overlap(rows["train"], test, options.drop_overlap, report)
    for split, part in rows.items():
        passages = None
        if "{passages}" in template:
            passages = _search(part, options.retriever_url, options.topk)
        add_prompts(part, template, passages)
        path = options.local_dir / f"{split}.parquet"
        report(f"{path}: {write_parquet(path, part):,} rows")


def _sets(options: argparse.Namespace) -> dict[str, list[str]]:
    """Split -> source names that the options ask for."""
    if options.split == "all":
        if options.data_sources:
            raise ValueError("--data_sources needs --split train or test: the two have different sources")
        return DEFAULT_SOURCES
    given = (options.data_sources or "").split(",") if options.data_sources else []
    names = [name.strip() for name in given if name.strip()] or DEFAULT_SOURCES[options.split]
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"--data_sources: found {name!r}, expected some of {', '.join(SOURCES)}")
    if len(set(names)) < len(names):
        raise ValueError(f"--data_sources: {options.data_sources} names a source twice")
    return {options.split: names}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Question sets -> Search-R1's train.parquet and test.parquet."
    )
    parser.add_argument(
        "--local_dir", type=Path, default=Path("data/nq_search"), help="where to write (data/nq_search)"
    )
    parser.add_argument("--split", choices=["all", "train", "test"], default="all", help="what to make (all)")
    parser.add_argument("--data_sources", help=f"comma list of {', '.join(SOURCES)}; default: Search-R1's")
    parser.add_argument(
        "--raw_dir", type=Path, help="folder with the files; without it the FlashRAG collection is downloaded"
    )
    parser.add_argument(
        "--template_type", choices=sorted(TEMPLATES), default="base",
        help="base: explains the search engine; no_search; rag: with passages; short: for the tiny model",
    )  # fmt: skip
    parser.add_argument("--template", type=Path, help=TEMPLATE_HELP)
    parser.add_argument("--retriever_url", help="server that finds the passages of --template_type rag")
    parser.add_argument("--topk", type=int, default=3, help="passages for --template_type rag (3)")
    parser.add_argument(
        "--drop_overlap", action="store_true", help="leave out of train what the test set asks"
    )
    options = parser.parse_args(argv)
    try:
        prepare(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
