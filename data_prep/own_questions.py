"""Questions and documents of your own, as training and test rows and a corpus.

    python -m data_prep.own_questions questions.jsonl --documents documents.jsonl --out data/mine

    {"question", "answer"} a line -> train.jsonl, test.jsonl (Search-R1's row schema), prompt_template.txt
    documents -> passages of about 100 words -> corpus.jsonl

`answer` is one text or number, or a list of them, each of which is right. A document is a line
{"title", "text"} or {"contents"} of a file, or a .txt or .md file of a folder, whose name is its title. The
files of records may be .jsonl, .json (a list) or .parquet.

`extra_info.gold_ids` of a row has the ids of the passages in which an answer stands. Questions whose answers
stand in no passage are named, because no search can find them. docs/your_own_questions.md tells more.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import files, prompts
from verl.utils.reward_score.qa_em import check_answers, normalize_answer

PROMPTS = {"search": prompts.SEARCH_PROMPT, "base": prompts.BASE_PROMPT, "short": prompts.MICROWORLD_PROMPT}
ANSWER_KEYS = ("answer", "answers", "golden_answers")
TEXT_SUFFIXES = (".txt", ".md")
TEMPLATE_FILE = "prompt_template.txt"  # infer.py asks with it
NUM_SHOWN = 5  # questions that a note names

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class OwnQuestion(NamedTuple):
    """A question, its right answers, and where it stands."""

    question: str
    answers: list[str]
    place: str


class Passage(NamedTuple):
    """A piece of a document, with the document's title."""

    title: str
    text: str


def read_questions(path: Path) -> list[OwnQuestion]:
    """Read the questions of a file.

    Raises ValueError, with the place, for a record that is no question with an answer.
    """
    questions = []
    for place, record in files.read_records(path):
        question = files.get_field(record, "question", str, place)
        if not question.strip():
            raise ValueError(f"{place}: the question is empty")
        key = next((key for key in ANSWER_KEYS if key in record), None)
        if key is None:
            raise ValueError(f"{place}: no 'answer'; its keys are {sorted(map(str, record))}")
        questions.append(
            OwnQuestion(files.tidy_question(question), read_answers(record[key], key, place), place)
        )
    return questions


def read_answers(cell: Any, key: str, place: str) -> list[str]:
    """Return the answers in a cell: one text or number, or a list of them.

    Raises ValueError, with the place, if there is none or if one can't be compared with what a model writes.
    """
    cells = cell if isinstance(cell, list) else [cell]
    if not cells or None in cells:
        raise ValueError(f"{place}: {key!r} holds {files.describe(cell)}; expected an answer")
    try:
        check_answers({"target": cells})
    except ValueError as error:
        raise ValueError(f"{place}: {key!r}: {error}") from None
    answers = list(dict.fromkeys(str(answer).strip() for answer in cells))
    answers = [answer for answer in answers if answer]
    if not answers:
        raise ValueError(f"{place}: {key!r} holds {files.describe(cell)}; expected an answer")
    return answers


def joined(questions: list[OwnQuestion]) -> list[OwnQuestion]:
    """Return each question once, with the answers of all its occurrences.

    A question that comes twice would else be trained on and asked in the test.
    """
    by_text: dict[str, OwnQuestion] = {}
    for question in questions:
        key = question.question.casefold()
        first = by_text.get(key, question)
        answers = list(dict.fromkeys([*first.answers, *question.answers]))
        by_text[key] = first._replace(answers=answers)
    if len(by_text) < len(questions):
        print(f"note: {len(questions) - len(by_text)} questions came before; their answers are put together")
    return list(by_text.values())


def read_documents(path: Path) -> Iterator[Passage]:
    """Yield the documents of a file of records, or of a folder of text files.

    Raises ValueError, with the place, for what is no document.
    """
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)
        if not paths:
            raise ValueError(f"{path}: found no {' or '.join(TEXT_SUFFIXES)} file in the folder")
        for file in paths:
            yield Passage(file.stem.replace("_", " "), files.read_text(file))
        return
    if path.suffix in TEXT_SUFFIXES:
        yield Passage(path.stem.replace("_", " "), files.read_text(path))
        return
    for place, record in files.read_records(path):
        if isinstance(record, dict) and "contents" in record and "text" not in record:
            title, _, text = files.get_field(record, "contents", str, place).partition("\n")
            document = Passage(title.strip('" '), text) if text.strip() else Passage("", title)
        else:
            text = files.get_field(record, "text", str, place)
            title = files.get_field(record, "title", str, place) if "title" in record else ""
            document = Passage(title, text)
        if not document.text.strip():
            raise ValueError(f"{place}: the text is empty (title {document.title!r})")
        yield document


def split_document(document: Passage, num_words: int) -> Iterator[Passage]:
    """Yield a document's passages of at most `num_words` words.

    A passage ends where a sentence ends, unless the sentence is longer than a passage.
    """
    passage: list[str] = []
    for sentence in _SENTENCE_END.split(document.text):
        words = sentence.split()
        if passage and len(passage) + len(words) > num_words:
            yield Passage(document.title, " ".join(passage))
            passage = []
        passage += words
        while len(passage) > num_words:
            yield Passage(document.title, " ".join(passage[:num_words]))
            passage = passage[num_words:]
    if passage:
        yield Passage(document.title, " ".join(passage))


def passages_with_answers(questions: list[OwnQuestion], passages: list[Passage]) -> list[list[str]]:
    """Return for each question the ids of the passages in which one of its answers stands."""
    texts = [f" {normalize_answer(f'{passage.title} {passage.text}')} " for passage in passages]
    gold_ids = []
    for question in questions:
        answers = [f" {normalize_answer(answer)} " for answer in question.answers]
        answers = [answer for answer in answers if answer.strip()]
        gold_ids.append([str(i) for i, text in enumerate(texts) if any(answer in text for answer in answers)])
    return gold_ids


def note_lost_answers(questions: list[OwnQuestion], gold_ids: list[list[str]]) -> None:
    """Name the questions whose answers stand in no passage."""
    lost = [question for question, ids in zip(questions, gold_ids, strict=True) if not ids]
    if not lost:
        return
    shown = "; ".join(f"{question.place}: {question.question}" for question in lost[:NUM_SHOWN])
    more = f"; and {len(lost) - NUM_SHOWN} more" if len(lost) > NUM_SHOWN else ""
    print(
        f"note: the answers of {len(lost)} of {len(questions)} questions stand in no document, word for "
        f"word: no search finds them ({shown}{more})"
    )


def write_rows(options: argparse.Namespace) -> dict[str, int]:
    """Write the files, as the command's options say; return the number of rows of each.

    Raises ValueError for bad options or input.
    """
    if not 0 < options.test_share < 1:
        raise ValueError(f"--test-share {options.test_share}: give a share between 0 and 1")
    if options.passage_words < 10:
        raise ValueError(f"--passage-words {options.passage_words}: give 10 or more")
    template = prompts.read_template(options.template) if options.template else PROMPTS[options.prompt]
    options.out = out = out_folder(options)  # the command prints where the files are
    questions = joined([question for path in options.questions for question in read_questions(path)])
    if len(questions) < 2:
        raise ValueError(f"{len(questions)} questions found: at least 2 make a training and a test row")
    documents = [document for path in options.documents for document in read_documents(path)]
    passages = list(
        dict.fromkeys(
            passage for document in documents for passage in split_document(document, options.passage_words)
        )
    )
    gold_ids = passages_with_answers(questions, passages)
    if passages:
        note_lost_answers(questions, gold_ids)
    order = list(range(len(questions)))
    random.Random(f"own questions {options.seed}").shuffle(order)
    num_test = min(max(1, round(len(questions) * options.test_share)), len(questions) - 1)
    for name in ("train", "test"):
        if (out / f"{name}.parquet").exists():
            raise ValueError(f"{out / name}.parquet is there already; remove it, or name another --out")
    counts: dict[str, int] = {}
    if passages:
        lines = ({"id": str(i), "contents": f'"{p.title}"\n{p.text}'} for i, p in enumerate(passages))
        counts["corpus.jsonl"] = files.write_jsonl(out / "corpus.jsonl", lines)
    for name, chosen in (("test", order[:num_test]), ("train", order[num_test:])):
        rows = []
        for index, number in enumerate(sorted(chosen)):
            question = questions[number]
            prompt = prompts.fill_prompt(template, question.question)
            row = files.make_row("own", prompt, question.question, question.answers, name, index)
            row["extra_info"] |= {"question": question.question, "gold_ids": gold_ids[number]}
            rows.append(row)
        counts[f"{name}.jsonl"] = files.write_jsonl(out / f"{name}.jsonl", rows)
    (out / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return counts


def out_folder(options: argparse.Namespace) -> Path:
    """Return the folder to write to: --out, or one named after the first file of questions."""
    folder: Path | None = options.out
    return folder or Path("data") / options.questions[0].stem


def training_command(out: Path) -> str:
    """Return the command that trains on the rows of a folder."""
    server = "" if (out / "corpus.jsonl").exists() else "RETRIEVER_URL=http://host:8000/retrieve "
    return f"DATA_DIR={out} {server}BASE_MODEL=<a pretrained model> bash train_grpo.sh"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Questions and documents of your own -> rows and a corpus.")
    add = parser.add_argument
    add("questions", type=Path, nargs="+", help="JSON lines (or a JSON list) of {question, answer}")
    help_text = "files of {title, text} or {contents}, or folders of .txt and .md files"
    add("--documents", type=Path, nargs="+", default=[], help=help_text)
    add("--out", type=Path, help="folder to write to (data/<name of the questions' file>)")
    add("--test-share", type=float, default=0.25, help="share of the questions that are for testing (0.25)")
    add(
        "--passage-words",
        type=int,
        default=100,
        help="most words of a passage; longer documents are cut (100)",
    )
    add("--seed", type=int, default=0, help="which questions are for testing (0)")
    help_text = "'search' explains the tags at length, 'base' in a line (for a small pretrained model; see "
    help_text += "search-r1 demonstrations), 'short' is what the shipped tiny model knows (search)"
    add("--prompt", choices=sorted(PROMPTS), default="search", help=help_text)
    add("--template", type=Path, help="file with your own prompt, with {question} in it")
    options = parser.parse_args(argv)
    status = files.run_command(parser, write_rows, argv)
    if status == 0:
        print(f"Train: {training_command(out_folder(options))}")
    return status


if __name__ == "__main__":
    sys.exit(main())
