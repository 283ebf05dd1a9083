"""Any SQuAD-format files and any lists of passages, as a corpus and parquet rows.

    python -m data_prep.squad --squad xquad.en.json --passages more_passages.json --out data/squad

    SQuAD 1.1 or 2.0 files  -> their paragraphs -> corpus.jsonl, passage ids from 0 in the order read
                            -> their questions  -> train.parquet / test.parquet (Search-R1's row schema)
    passage files (JSON list or JSON lines of {"title", "text"}) -> more of corpus.jsonl

The same title and text twice is one passage. Questions that are marked unanswerable or have no answer are
left out and counted. `extra_info.gold_ids` has the id of the passage that a question was asked about, so that
retrieval can be measured. Malformed input is a ValueError that says which file, where, and what was found.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.files import make_row, write_jsonl, write_parquet
from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT, fill_prompt, read_template
from data_prep.records import describe, read_json, take

PROMPTS = {"search": SEARCH_PROMPT, "short": MICROWORLD_PROMPT}


@dataclass
class Collection:
    """Passages by (title, text) with their ids, and answerable questions."""

    passages: dict[tuple[str, str], int] = field(default_factory=dict)
    questions: list[dict[str, Any]] = field(default_factory=list)
    num_unanswerable: int = 0
    num_repeated: int = 0

    def add_passage(self, title: str, text: str) -> int:
        """The id of a passage, new or known. Inner line breaks become spaces: the first line is the title."""
        key = (" ".join(title.split()), " ".join(text.split()))
        if key in self.passages:
            self.num_repeated += 1
        return self.passages.setdefault(key, len(self.passages))


def read_squad(path: Path, collection: Collection) -> None:
    """Add a SQuAD 1.1 or 2.0 file's paragraphs and questions; underscores in titles become spaces."""
    for a, article in enumerate(take(read_json(path), "data", list, str(path))):
        where = f"{path}, data[{a}]"
        title = take(article, "title", str, where).replace("_", " ")
        for p, paragraph in enumerate(take(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{p}]"
            passage = collection.add_passage(title, take(paragraph, "context", str, place))
            for q, entry in enumerate(take(paragraph, "qas", list, place)):
                add_question(entry, passage, f"{place}.qas[{q}]", collection)


def add_question(entry: Any, passage: int, where: str, collection: Collection) -> None:
    """Add one entry of `qas`, or count it as unanswerable."""
    question = take(entry, "question", str, where).strip()
    if not question:
        raise ValueError(f"{where}: the question is empty")
    question = question if question.endswith("?") else question + "?"  # as in Search-R1's rows, and infer.py
    listed = take(entry, "answers", list, where) if not entry.get("is_impossible") else []
    texts = [take(answer, "text", str, f"{where}.answers[{k}]").strip() for k, answer in enumerate(listed)]
    answers = list(dict.fromkeys(text for text in texts if text))
    if not answers:
        collection.num_unanswerable += 1
        return
    collection.questions.append(
        {"question": question, "answers": answers, "passage": passage, "source_id": str(entry.get("id", ""))}
    )


def read_passages(path: Path, collection: Collection) -> None:
    """Add a list of {"title", "text"} to the collection."""
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of {{title, text}}, found {describe(rows)}")
    for index, row in enumerate(rows):
        where = f"{path}, passage {index}"
        title, text = take(row, "title", str, where), take(row, "text", str, where)
        if not text.strip():
            raise ValueError(f"{where}: the text is empty (title {title!r})")
        collection.add_passage(title, text)


def convert(
    squad_files: list[Path], passage_files: list[Path], out: Path, test_share: float, seed: int, template: str
) -> dict[str, int]:
    """Write corpus.jsonl, train.parquet and test.parquet into `out`; returns counts of what was read."""
    if not 0 < test_share < 1:
        raise ValueError(f"--test-share {test_share}: give a share between 0 and 1")
    if not squad_files:
        raise ValueError("no SQuAD file given: questions come from them (--squad FILE ...)")
    collection = Collection()
    for path in squad_files:
        read_squad(path, collection)
    for path in passage_files:
        read_passages(path, collection)
    if len(collection.questions) < 2:
        raise ValueError(
            f"{len(collection.questions)} answerable questions found: at least 2 make a train and a test"
        )
    questions = list(collection.questions)
    random.Random(f"squad {seed}").shuffle(questions)
    num_test = min(max(1, round(len(questions) * test_share)), len(questions) - 1)

    def rows(part: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
        return [
            make_row(
                "squad", fill_prompt(template, q["question"]), q["question"], q["answers"], split,
                index, gold_ids=[str(q["passage"])], source_id=q["source_id"],
            )
            for index, q in enumerate(part)
        ]  # fmt: skip

    corpus = (
        {"id": str(i), "contents": f'"{title}"\n{text}'} for (title, text), i in collection.passages.items()
    )
    write_jsonl(out / "corpus.jsonl", corpus)
    write_parquet(out / "train.parquet", rows(questions[num_test:], "train"))
    write_parquet(out / "test.parquet", rows(questions[:num_test], "test"))
    return {
        "passages": len(collection.passages),
        "repeated passages left out": collection.num_repeated,
        "train questions": len(questions) - num_test,
        "test questions": num_test,
        "unanswerable questions left out": collection.num_unanswerable,
    }


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", choices=sorted(PROMPTS), default="search",
        help="'search' explains the tags (for language models), 'short' is what the tiny base model knows",
    )  # fmt: skip
    parser.add_argument("--template", type=Path, help="file with your own prompt, with {question} in it")


def chosen_template(options: argparse.Namespace) -> str:
    """The prompt that --template or --prompt asks for. Raises ValueError for a file that won't do."""
    return read_template(options.template) if options.template else PROMPTS[options.prompt]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="SQuAD-format files and passages -> corpus and parquet rows."
    )
    parser.add_argument("--squad", type=Path, nargs="+", required=True, help="SQuAD 1.1 or 2.0 files")
    parser.add_argument(
        "--passages", type=Path, nargs="*", default=[], help="JSON or JSON lines of {title, text}"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--test-share", type=float, default=0.25, help="share of questions for testing (0.25)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which questions are for testing (0)")
    add_prompt_flags(parser)
    args = parser.parse_args()
    try:
        template = chosen_template(args)
        counts = convert(args.squad, args.passages, args.out, args.test_share, args.seed, template)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
