"""Search-R1's scripts/data_process/*.py: the same flags, the same files, the same fields of a row.

    script and its flags -> questions of the FlashRAG collection -> rows -> train.parquet, test.parquet

The prompt has this project's words; `--template FILE` gives any others. `--raw_dir FOLDER` reads the
questions from files. `extra_info.index` counts within each source, as it does there, not over the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.files import write_parquet
from data_prep.prompts import NO_SEARCH_PROMPT, RAG_PROMPT, SEARCH_PROMPT, format_passages, read_template
from data_prep.qa_search import TEMPLATE_HELP, add_prompts, read_split, tidy_question
from data_prep.qa_sources import SOURCES
from data_prep.records import read_json


@dataclass(frozen=True)
class Script:
    """What a script writes where, and its prompt. `sources`: None: a flag says which."""

    local_dir: str
    template: str
    splits: tuple[str, ...]
    sources: tuple[str, ...] | None = ("nq",)


SCRIPTS = {
    "nq": Script("./data/nq", NO_SEARCH_PROMPT, ("train", "test")),
    "nq_rag": Script("./data/nq_rag", RAG_PROMPT, ("train", "test")),
    "nq_search": Script("./data/nq_search", SEARCH_PROMPT, ("train", "test")),
    "qa_search_train_merge": Script("./data/nq_search", SEARCH_PROMPT, ("train",), None),
    "qa_search_test_merge": Script("./data/nq_search", SEARCH_PROMPT, ("test",), None),
}


def build_parser(name: str) -> argparse.ArgumentParser:
    script = SCRIPTS[name]
    parser = argparse.ArgumentParser(description=f"Search-R1's {name}.py: question sets to parquet rows.")
    parser.add_argument("--local_dir", type=Path, default=Path(script.local_dir), help="where to write")
    parser.add_argument("--hdfs_dir", help="refused: there is no HDFS here")
    parser.add_argument("--template_type", choices=["base"], default="base")
    parser.add_argument("--template", type=Path, help=TEMPLATE_HELP)
    parser.add_argument("--raw_dir", type=Path, help="folder with the files; default: the hub")
    if script.sources is None:
        parser.add_argument("--data_sources", default="nq", help=f"comma list of {', '.join(SOURCES)} (nq)")
    if name == "nq_rag":
        parser.add_argument("--topk", type=int, default=3, help="passages of a question (3)")
        parser.add_argument("--corpus_path", type=Path, required=True, help="wiki-18.jsonl")
        for split in script.splits:
            parser.add_argument(f"--{split}_retrieval_cache", type=Path, required=True,
                                help='JSON file {question: [{"id"}, ...]}')  # fmt: skip
    return parser


def prepare(name: str, options: argparse.Namespace) -> None:
    """Writes the script's files. Raises ValueError for bad options or files."""
    script = SCRIPTS[name]
    if options.hdfs_dir is not None:
        raise ValueError(f"--hdfs_dir: there is no HDFS here; leave it out and copy {options.local_dir}")
    sources = list(script.sources or (word.strip() for word in options.data_sources.split(",")))
    unknown = [source for source in sources if source not in SOURCES]
    if unknown:
        raise ValueError(f"--data_sources: found {unknown[0]!r}, expected some of {', '.join(SOURCES)}")
    template = read_template(options.template) if options.template else script.template
    for split in script.splits:
        rows: list[dict[str, Any]] = []
        for source in sources:
            rows += read_split(split, [source], options.raw_dir, print)
        passages = None
        if name == "nq_rag":
            cache = getattr(options, f"{split}_retrieval_cache")
            passages = _cached_passages(rows, cache, options.corpus_path, options.topk)
        add_prompts(rows, template, passages)
        path = options.local_dir / f"{split}.parquet"
        print(f"{path}: {write_parquet(path, rows):,} rows")


def _cached_passages(rows: list[dict[str, Any]], cache: Path, corpus: Path, topk: int) -> list[str]:
    """The passages of each row's question: their ids are in `cache`, their texts in `corpus`."""
    cached = read_json(cache)
    if not isinstance(cached, dict):
        raise ValueError(f"{cache}: expected an object {{question: [{{id}}, ...]}}")
    ids = {tidy_question(text): [str(each["id"]) for each in each_list] for text, each_list in cached.items()}
    missing = [row["question"] for row in rows if row["question"] not in ids]
    if missing:
        raise ValueError(f"{cache}: no passages for {missing[0]!r} and {len(missing) - 1} other questions")
    chosen = [ids[row["question"]][:topk] for row in rows]
    wanted = {each for some in chosen for each in some}
    contents: dict[str, str] = {}
    with corpus.open("rb") as lines:  # line by line: wiki-18.jsonl has 14 GB
        for line in lines:
            record = json.loads(line)
            if str(record["id"]) in wanted:
                contents[str(record["id"])] = record["contents"]
    if absent := wanted - set(contents):
        raise ValueError(f"{corpus}: no passage has the id {min(absent)!r}, which {cache} names")
    texts = []
    for some in chosen:
        parts = [contents[each].partition("\n") for each in some]
        texts.append(format_passages([(title, text) for title, _, text in parts]))
    return texts


def main(name: str, argv: list[str] | None = None) -> int:
    """Runs the script `name`. Exit status: 0, or 2 for a mistake of the user."""
    try:
        prepare(name, build_parser(name).parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
