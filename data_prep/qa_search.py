"""Search-R1's question sets as parquet rows, from the FlashRAG collection.

    python -m data_prep.qa_search                       Search-R1's training and test sets, in data/nq_search
    python scripts/data_process/nq_search.py            Search-R1's scripts: its flags, files and fields

    {source}/{split}.jsonl (of the hub, or of --raw_dir) -> questions -> rows -> train.parquet, test.parquet

The prompt has this project's words; `--template FILE` replaces them. Records without an accepted answer are
left out and counted. `extra_info.index` counts within each source, as it does in Search-R1; `id` is never
repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import files, prompts
from data_prep.hub import fetch_file

REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
TEST_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SOURCES = (*TEST_SOURCES, "web_questions", "strategyqa")
SPLITS_TO_TRY = {"train": ("train",), "test": ("test", "dev", "train")}


class Script(NamedTuple):
    """The folder in data/ that a program writes to, its prompt, and the sources of each split.

    Empty sources mean that a flag names them.
    """

    folder: str
    template: str
    sources: dict[str, tuple[str, ...]]


SCRIPTS = {
    "qa_search": Script(
        "nq_search", prompts.SEARCH_PROMPT, {"train": ("nq", "hotpotqa"), "test": TEST_SOURCES}
    ),
    "nq": Script("nq", prompts.NO_SEARCH_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "nq_rag": Script("nq_rag", prompts.RAG_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "nq_search": Script("nq_search", prompts.SEARCH_PROMPT, {"train": ("nq",), "test": ("nq",)}),
    "qa_search_train_merge": Script("nq_search", prompts.SEARCH_PROMPT, {"train": ()}),
    "qa_search_test_merge": Script("nq_search", prompts.SEARCH_PROMPT, {"test": ()}),
}


def build_parser(name: str) -> argparse.ArgumentParser:
    script = SCRIPTS[name]
    parser = argparse.ArgumentParser(description="Search-R1's question sets as parquet rows.")
    add = parser.add_argument
    add("--local_dir", type=Path, default=Path("data") / script.folder, help="where to write")
    add("--hdfs_dir", help="refused: there is no HDFS here")
    add("--template_type", choices=["base"], default="base")
    add("--template", type=Path, help="file with your own prompt; {question} stands for the question")
    add("--raw_dir", type=Path, help="folder with {source}/{split}.jsonl; default: the hub")
    if () in script.sources.values():
        add("--data_sources", default="nq", help=f"comma list of {', '.join(SOURCES)} (nq)")
    if name == "nq_rag":
        add("--topk", type=int, default=3, help="passages of a question (3)")
        add("--corpus_path", type=Path, required=True, help="wiki-18.jsonl")
        for split in script.sources:
            help_text = 'JSON file {question: [{"id"}, ...]}'
            add(f"--{split}_retrieval_cache", type=Path, required=True, help=help_text)
    return parser


def read_split(source: str, split: str, raw_dir: Path | None) -> list[dict[str, Any]]:
    """Return a source's rows, without a prompt.

    If there is no test split, its dev split is read, or else its train split.

    Raises:
        ValueError: there is no such split, or a record is malformed.
    """
    names = [f"{source}/{name}.jsonl" for name in SPLITS_TO_TRY[split]]
    for name in names:
        path = raw_dir / name if raw_dir else fetch_file(REPOSITORY, name)
        if path is not None and path.is_file():
            break
    else:
        raise ValueError(f"{raw_dir or REPOSITORY} has no {' or '.join(names)}")
    rows: list[dict[str, Any]] = []
    identifiers: set[str] = set()
    num_without_answer = 0
    for where, record in files.read_records(path):
        question = files.get_field(record, "question", str, where)
        answers = accepted_answers(files.get_field(record, "golden_answers", object, where), where)
        if not question.strip():
            raise ValueError(f"{where}: the question is empty")
        if not answers:
            num_without_answer += 1
            continue
        source_id = str(record.get("id", ""))
        number = 1
        base = identifier = f"{source}_{source_id or f'{split}_{len(rows)}'}"
        while identifier in identifiers:
            number += 1
            identifier = f"{base}#{number}"
        identifiers.add(identifier)
        row = files.make_row(source, "", files.tidy_question(question), answers, split, len(rows))
        metadata = (record.get("metadata") or {}).items()
        facts = {key: str(value) for key, value in metadata if isinstance(value, str | int | float)}
        # `source_id` keeps the column from being an object without fields, which parquet can't hold.
        rows.append({**row, "id": identifier, "metadata": {"source_id": source_id, **facts}})
    print(f"{split}: {source}: {len(rows):,} questions from {path}, {num_without_answer:,} without an answer")
    return rows


def accepted_answers(values: Any, where: str) -> list[str]:
    """Return the distinct texts of one value or of a list of them, truth values as yes and no.

    Raises ValueError if an answer is no text.
    """
    answers = []
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: an answer must be a text, found {files.describe(value)}")
        answers.append({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value).strip())
    return list(dict.fromkeys(answer for answer in answers if answer))


def prepare(name: str, options: argparse.Namespace) -> None:
    """Write the program's files. Raises ValueError for bad options or files."""
    script = SCRIPTS[name]
    if options.hdfs_dir is not None:
        raise ValueError(f"--hdfs_dir: there is no HDFS here; leave it out and copy {options.local_dir}")
    template = prompts.read_template(options.template) if options.template else script.template
    # The passages are filled in last, because a question may have braces in it.
    head, _, tail = template.partition("{passages}") if name == "nq_rag" else (template, "", "")
    for split, sources in script.sources.items():
        sources = sources or tuple(word.strip() for word in options.data_sources.split(","))
        if unknown := [source for source in sources if source not in SOURCES]:
            raise ValueError(f"--data_sources: found {unknown[0]!r}, expected some of {', '.join(SOURCES)}")
        rows = [row for source in sources for row in read_split(source, split, options.raw_dir)]
        for row in rows:
            row["prompt"][0]["content"] = prompts.fill_prompt(head, row["question"])
        if name == "nq_rag":
            cache = getattr(options, f"{split}_retrieval_cache")
            for row, text in zip(rows, cached_passages(rows, cache, options), strict=True):
                row["prompt"][0]["content"] += text + tail
        path = options.local_dir / f"{split}.parquet"
        print(f"{path}: {files.write_parquet(path, rows):,} rows")


def cached_passages(rows: list[dict[str, Any]], cache: Path, options: argparse.Namespace) -> list[str]:
    """Return the passages of each row's question.

    Their ids are in `cache`, their texts in --corpus_path. Raises ValueError if some are missing.
    """
    cached = files.read_json(cache)
    if not isinstance(cached, dict):
        raise ValueError(f"{cache}: expected an object {{question: [{{id}}, ...]}}")
    ids = {
        files.tidy_question(question): [str(hit["id"]) for hit in hits] for question, hits in cached.items()
    }
    if unanswered := [row["question"] for row in rows if row["question"] not in ids]:
        raise ValueError(
            f"{cache}: no passages for {unanswered[0]!r} and {len(unanswered) - 1} other questions"
        )
    chosen = [ids[row["question"]][: options.topk] for row in rows]
    needed = {identifier for row_ids in chosen for identifier in row_ids}
    passages: dict[str, tuple[str, str]] = {}
    with options.corpus_path.open("rb") as lines:  # line by line: wiki-18.jsonl has 14 GB
        for record in map(json.loads, lines):
            if str(record["id"]) in needed:
                title, _, text = record["contents"].partition("\n")
                passages[str(record["id"])] = title, text
    if missing_ids := needed - passages.keys():
        raise ValueError(
            f"{options.corpus_path}: no passage has the id {min(missing_ids)!r}, which {cache} names"
        )
    return [prompts.format_passages([passages[identifier] for identifier in row_ids]) for row_ids in chosen]


def main(name: str = "qa_search", argv: list[str] | None = None) -> int:
    """Run the program `name`, and return the exit status: 0, or 2 for a mistake of the user."""
    return files.run_command(build_parser(name), lambda options: prepare(name, options), argv)


if __name__ == "__main__":
    sys.exit(main())
