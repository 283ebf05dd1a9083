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
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.files import (
    make_row,
    read_json,
    read_records,
    take,
    tidy_question,
    write_jsonl,
    write_parquet,
)
from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT, fill_prompt, read_template

PROMPTS = {"search": SEARCH_PROMPT, "short": MICROWORLD_PROMPT}
Passages = dict[tuple[str, str], int]  # (title, text) -> id


class PassageQuestion(NamedTuple):
    """A question, and the id of the passage that it was asked about. answers: empty if there is none."""

    question: str
    answers: list[str]
    passage: int
    source_id: str


def add_passage(passages: Passages, title: str, text: str) -> int:
    """The id of a passage, new or known. Inner line breaks become spaces: the first line is the title."""
    return passages.setdefault((" ".join(title.split()), " ".join(text.split())), len(passages))


def read_squad(path: Path, passages: Passages) -> list[PassageQuestion]:
    """The questions of a SQuAD file, whose paragraphs are added; underscores in titles become spaces."""
    questions = []
    for a, article in enumerate(take(read_json(path), "data", list, str(path))):
        where = f"{path}, data[{a}]"
        title = take(article, "title", str, where).replace("_", " ")
        for p, paragraph in enumerate(take(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{p}]"
            passage = add_passage(passages, title, take(paragraph, "context", str, place))
            for q, entry in enumerate(take(paragraph, "qas", list, place)):
                questions.append(read_question(entry, passage, f"{place}.qas[{q}]"))
    return questions


def read_question(entry: Any, passage: int, where: str) -> PassageQuestion:
    """One entry of `qas`."""
    question = take(entry, "question", str, where)
    if not question.strip():
        raise ValueError(f"{where}: the question is empty")
    listed = take(entry, "answers", list, where) if not entry.get("is_impossible") else []
    texts = [take(answer, "text", str, f"{where}.answers[{k}]").strip() for k, answer in enumerate(listed)]
    answers = list(dict.fromkeys(text for text in texts if text))
    return PassageQuestion(tidy_question(question), answers, passage, str(entry.get("id", "")))


def convert(
    squad_files: list[Path], passage_files: list[Path], out: Path, test_share: float, seed: int, template: str
) -> dict[str, int]:
    """Write corpus.jsonl, train.parquet and test.parquet into `out`; returns counts of what was read."""
    if not 0 < test_share < 1:
        raise ValueError(f"--test-share {test_share}: give a share between 0 and 1")
    passages: Passages = {}
    read = [question for path in squad_files for question in read_squad(path, passages)]
    for path in passage_files:
        for where, record in read_records(path):
            title, text = take(record, "title", str, where), take(record, "text", str, where)
            if not text.strip():
                raise ValueError(f"{where}: the text is empty (title {title!r})")
            add_passage(passages, title, text)
    questions = [question for question in read if question.answers]
    if len(questions) < 2:
        raise ValueError(f"{len(questions)} answerable questions found: at least 2 make a train and a test")
    random.Random(f"squad {seed}").shuffle(questions)
    num_test = min(max(1, round(len(questions) * test_share)), len(questions) - 1)
    corpus = ({"id": str(i), "contents": f'"{title}"\n{text}'} for (title, text), i in passages.items())
    write_jsonl(out / "corpus.jsonl", corpus)
    for split, part in (("train", questions[num_test:]), ("test", questions[:num_test])):
        rows = [
            make_row(
                "squad", fill_prompt(template, q.question), q.question, q.answers, split, index,
                gold_ids=[str(q.passage)], source_id=q.source_id,
            )
            for index, q in enumerate(part)
        ]  # fmt: skip
        write_parquet(out / f"{split}.parquet", rows)
    return {
        "passages": len(passages),
        "train questions": len(questions) - num_test,
        "test questions": num_test,
        "unanswerable questions left out": len(read) - len(questions),
    }


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
    parser.add_argument(
        "--prompt", choices=sorted(PROMPTS), default="search",
        help="'search' explains the tags (for language models), 'short' is what the tiny base model knows",
    )  # fmt: skip
    parser.add_argument("--template", type=Path, help="file with your own prompt, with {question} in it")
    args = parser.parse_args()
    try:
        template = read_template(args.template) if args.template else PROMPTS[args.prompt]
        counts = convert(args.squad, args.passages, args.out, args.test_share, args.seed, template)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
