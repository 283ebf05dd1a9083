"""Search-R1's question sets as parquet rows, from the FlashRAG collection.

    python -m data_prep.qa_search                       Search-R1's training and test sets, in data/nq_search
    python scripts/data_process/nq_search.py            Search-R1's scripts: its flags, files and fields

    {source}/{split}.jsonl (of the hub, or of --raw_dir) -> questions -> rows -> train.parquet, test.parquet

The prompt has this project's words; `--template FILE` gives any others. Records without an accepted answer
are left out and counted. `extra_info.index` counts within each source, as it does in Search-R1; `id` is
never repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.files import describe, make_row, read_json, read_records, take, tidy_question, write_parquet
from data_prep.hub import fetch_file
from data_prep.prompts import (
    NO_SEARCH_PROMPT,
    RAG_PROMPT,
    SEARCH_PROMPT,
    fill_prompt,
    format_passages,
    read_template,
)

REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
TEST_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SOURCES = (*TEST_SOURCES, "web_questions", "strategyqa")
SPLITS_TO_TRY = {"train": ("train",), "test": ("test", "dev", "train")}


@dataclass(frozen=True)
class Script:
    """Where a program writes, its prompt, and the sources of each split; (): a flag says which."""

    local_dir: str
    template: str
    sources: dict[str, tuple[str, ...]]


SCRIPTS = {
    "qa_search": Script("data/nq_search", SEARCH_PROMPT, {"train": ("nq", "hotpotqa"), "test": TEST_SOURCES}),
    "nq": Script("./data/nq", NO_SEARCH_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "nq_rag": Script("./data/nq_rag", RAG_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "nq_search": Script("./data/nq_search", SEARCH_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "qa_search_train_merge": Script("./data/nq_search", SEARCH_PROMPT, {"train": ()}),
    "qa_search_test_merge": Script("./data/nq_search", SEARCH_PROMPT, {"test": ()}),
}


def build_parser(name: str) -> argparse.ArgumentParser:
    script = SCRIPTS[name]
    parser = argparse.ArgumentParser(description="Search-R1's question sets as parquet rows.")
    parser.add_argument("--local_dir", type=Path, default=Path(script.local_dir), help="where to write")
    parser.add_argument("--hdfs_dir", help="refused: there is no HDFS here")
    parser.add_argument("--template_type", choices=["base"], default="base")
    parser.add_argument(
        "--template", type=Path, help="file with your own prompt; {question} stands for the question"
    )
    parser.add_argument("--raw_dir", type=Path, help="folder with {source}/{split}.jsonl; default: the hub")
    if () in script.sources.values():
        parser.add_argument("--data_sources", default="nq", help=f"comma list of {', '.join(SOURCES)} (nq)")
    if name == "nq_rag":
        parser.add_argument("--topk", type=int, default=3, help="passages of a question (3)")
        parser.add_argument("--corpus_path", type=Path, required=True, help="wiki-18.jsonl")
        for split in script.sources:
            parser.add_argument(f"--{split}_retrieval_cache", type=Path, required=True,
                                help='JSON file {question: [{"id"}, ...]}')  # fmt: skip
    return parser


def read_split(source: str, split: str, raw_dir: Path | None) -> list[dict[str, Any]]:
    """A source's rows, without a prompt; where there is no test split its dev split, or else train.

    Raises ValueError: there is no such split, or a record is malformed.
    """
    for name in SPLITS_TO_TRY[split]:
        path: Path | None
        if raw_dir is None:
            path = fetch_file(REPOSITORY, f"{source}/{name}.jsonl")
        else:
            path = raw_dir / source / f"{name}.jsonl"
        if path is not None and path.is_file():
            break
    else:
        tried = " or ".join(f"{source}/{name}.jsonl" for name in SPLITS_TO_TRY[split])
        raise ValueError(f"{raw_dir or REPOSITORY} has no {tried}")
    rows: list[dict[str, Any]] = []
    identifiers: set[str] = set()
    num_without_answer = 0
    for where, record in read_records(path):
        question = take(record, "question", str, where)
        answers = accepted_answers(take(record, "golden_answers", object, where), where)
        if not question.strip():
            raise ValueError(f"{where}: the question is empty")
        if not answers:
            num_without_answer += 1
            continue
        source_id, number = str(record.get("id", "")), 1
        wanted = identifier = f"{source}_{source_id or f'{split}_{len(rows)}'}"
        while identifier in identifiers:
            number += 1
            identifier = f"{wanted}#{number}"
        identifiers.add(identifier)
        row = make_row(source, "", tidy_question(question), answers, split, len(rows))
        facts = {
            key: str(value)
            for key, value in (record.get("metadata") or {}).items()
            if isinstance(value, str | int | float)
        }
        # `source_id` keeps the column from being an object without fields, which parquet can't hold.
        rows.append({**row, "id": identifier, "metadata": {"source_id": source_id, **facts}})
    print(f"{split}: {source}: {len(rows):,} questions from {path}, {num_without_answer:,} without an answer")
    return rows


def accepted_answers(values: Any, where: str) -> list[str]:
    """Distinct texts of one value or of a list of them, truth values as yes and no."""
    answers = []
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: an answer must be a text, found {describe(value)}")
        answers.append({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value).strip())
    return list(dict.fromkeys(answer for answer in answers if answer))


def prepare(name: str, options: argparse.Namespace) -> None:
    """Writes the program's files. Raises ValueError for bad options or files."""
    script = SCRIPTS[name]
    if options.hdfs_dir is not None:
        raise ValueError(f"--hdfs_dir: there is no HDFS here; leave it out and copy {options.local_dir}")
    template = read_template(options.template) if options.template else script.template
    # The passages last: a question may have braces in it.
    before, _, after = template.partition("{passages}") if name == "nq_rag" else (template, "", "")
    for split, sources in script.sources.items():
        sources = sources or tuple(word.strip() for word in options.data_sources.split(","))
        if unknown := [source for source in sources if source not in SOURCES]:
            raise ValueError(f"--data_sources: found {unknown[0]!r}, expected some of {', '.join(SOURCES)}")
        rows = [row for source in sources for row in read_split(source, split, options.raw_dir)]
        for row in rows:
            row["prompt"][0]["content"] = fill_prompt(before, row["question"])
        if name == "nq_rag":
            cache = getattr(options, f"{split}_retrieval_cache")
            for row, text in zip(rows, cached_passages(rows, cache, options), strict=True):
                row["prompt"][0]["content"] += text + after
        path = options.local_dir / f"{split}.parquet"
        print(f"{path}: {write_parquet(path, rows):,} rows")


def cached_passages(rows: list[dict[str, Any]], cache: Path, options: argparse.Namespace) -> list[str]:
    """The passages of each row's question: their ids are in `cache`, their texts in --corpus_path."""
    cached = read_json(cache)
    if not isinstance(cached, dict):
        raise ValueError(f"{cache}: expected an object {{question: [{{id}}, ...]}}")
    ids = {tidy_question(text): [str(each["id"]) for each in each_list] for text, each_list in cached.items()}
    if missing := [row["question"] for row in rows if row["question"] not in ids]:
        raise ValueError(f"{cache}: no passages for {missing[0]!r} and {len(missing) - 1} other questions")
    chosen = [ids[row["question"]][: options.topk] for row in rows]
    wanted = {each for some in chosen for each in some}
    passages: dict[str, tuple[str, str]] = {}
    with options.corpus_path.open("rb") as lines:  # line by line: wiki-18.jsonl has 14 GB
        for record in map(json.loads, lines):
            if str(record["id"]) in wanted:
                title, _, text = record["contents"].partition("\n")
                passages[str(record["id"])] = title, text
    if absent := wanted - passages.keys():
        raise ValueError(f"{options.corpus_path}: no passage has the id {min(absent)!r}, which {cache} names")
    return [format_passages([passages[each] for each in some]) for some in chosen]


def main(name: str = "qa_search", argv: list[str] | None = None) -> int:
    """Runs the program `name`. Exit status: 0, or 2 for a mistake of the user."""
    try:
        prepare(name, build_parser(name).parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
