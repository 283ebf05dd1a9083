"""Any SQuAD-format files and any lists of passages, as a corpus and parquet rows.

    python -m data_prep.squad --squad xquad.en.json --passages more_passages.json --out data/squad

    SQuAD 1.1 or 2.0 files  -> their paragraphs -> corpus.jsonl, passage ids from 0 in the order read
                            -> their questions  -> train.parquet, test.parquet (Search-R1's row schema), and
                                                   with --num-val val.parquet
    passage files (JSON list or JSON lines of {"title", "text"}) -> more of corpus.jsonl

If the same title and text come twice, they are one passage. `--split-by passage` or `article` puts all
questions of a passage, or of all passages of one title, into one of the files. Training then reads nothing
that a test question is about. Questions that are marked unanswerable or have no answer are left out and
counted. `extra_info.gold_ids` has the id of the passage that a question was asked about, so that retrieval
can be measured. Malformed input raises a ValueError that says which file, where, and what was found.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from data_prep import files, prompts

PROMPTS = {"search": prompts.SEARCH_PROMPT, "base": prompts.BASE_PROMPT, "short": prompts.MICROWORLD_PROMPT}
SPLITS = ("question", "passage", "article")
Passages = dict[tuple[str, str], int]  # (title, text) -> id


class PassageQuestion(NamedTuple):
    """A question, and the id of the passage that it was asked about; `answers` is empty if there is none."""

    question: str
    answers: list[str]
    passage: int
    source_id: str


def add_passage(passages: Passages, title: str, text: str) -> int:
    """Return the id of a passage, new or known.

    Inner line breaks become spaces, because the first line is the title.
    """
    return passages.setdefault((" ".join(title.split()), " ".join(text.split())), len(passages))


def read_squad(path: Path, passages: Passages) -> list[PassageQuestion]:
    """Read the questions of a SQuAD file and add its paragraphs; underscores in titles become spaces."""
    questions = []
    for a, article in enumerate(files.get_field(files.read_json(path), "data", list, str(path))):
        where = f"{path}, data[{a}]"
        title = files.get_field(article, "title", str, where).replace("_", " ")
        for p, paragraph in enumerate(files.get_field(article, "paragraphs", list, where)):
            paragraph_place = f"{where}.paragraphs[{p}]"
            passage = add_passage(
                passages, title, files.get_field(paragraph, "context", str, paragraph_place)
            )
            for q, entry in enumerate(files.get_field(paragraph, "qas", list, paragraph_place)):
                question_place = f"{paragraph_place}.qas[{q}]"
                question = files.get_field(entry, "question", str, question_place)
                if not question.strip():
                    raise ValueError(f"{question_place}: the question is empty")
                answer_entries = (
                    files.get_field(entry, "answers", list, question_place)
                    if not entry.get("is_impossible")
                    else []
                )
                texts = [
                    files.get_field(a, "text", str, f"{question_place}.answers[{k}]")
                    for k, a in enumerate(answer_entries)
                ]
                answers = list(dict.fromkeys(filter(None, map(str.strip, texts))))
                source_id = str(entry.get("id", ""))
                questions.append(PassageQuestion(files.tidy_question(question), answers, passage, source_id))
    return questions


def split_questions(
    questions: list[PassageQuestion], titles: list[str], test_share: float, num_val: int, split_by: str
) -> dict[str, list[PassageQuestion]]:
    """Split the questions into {"train", "test", "val": their questions}.

    Groups go, in the order in which the questions name them, to test, then to val, until these have the
    number that they should have. All other groups are for training. `titles` are those of the passages.

    Raises ValueError if nothing remains to train on.
    """
    groups: list[Hashable] = list(range(len(questions)))
    if split_by != "question":
        groups = [q.passage if split_by == "passage" else titles[q.passage] for q in questions]
    num_test = min(max(1, round(len(questions) * test_share)), len(questions) - 1)
    side: dict[Hashable, str] = {}
    num_open = {"test": num_test, "val": num_val}
    for group, size in Counter(groups).items():
        side[group] = next((name for name in num_open if num_open[name] > 0), "train")
        if side[group] in num_open:
            num_open[side[group]] -= size
    sets: dict[str, list[PassageQuestion]] = {"train": [], "test": [], "val": []}
    for question, group in zip(questions, groups, strict=True):
        sets[side[group]].append(question)
    if not sets["train"]:
        raise ValueError(
            f"{len(side)} groups of questions (--split-by {split_by}) leave none for training after "
            f"{len(sets['test'])} for testing and {len(sets['val'])} of --num-val {num_val}: ask for fewer"
        )
    return sets


def convert(
    squad: list[Path],
    passages: list[Path],
    out: Path,
    test_share: float,
    seed: int,
    template: str,
    split_by: str = "question",
    num_val: int = 0,
) -> dict[str, int]:
    """Write corpus.jsonl, train.parquet, test.parquet and, with `num_val`, val.parquet into `out`.

    Returns the number of rows of each. Raises ValueError for bad input.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"--test-share {test_share}: give a share between 0 and 1")
    if num_val < 0:
        raise ValueError(f"--num-val {num_val}: give 0 or more")
    corpus_ids: Passages = {}
    read = [question for path in squad for question in read_squad(path, corpus_ids)]
    for path in passages:
        for where, record in files.read_records(path):
            title = files.get_field(record, "title", str, where)
            text = files.get_field(record, "text", str, where)
            if not text.strip():
                raise ValueError(f"{where}: the text is empty (title {title!r})")
            add_passage(corpus_ids, title, text)
    questions = [question for question in read if question.answers]
    if len(questions) < 2:
        raise ValueError(f"{len(questions)} answerable questions found: at least 2 make a train and a test")
    print(f"unanswerable questions left out: {len(read) - len(questions)}")
    random.Random(f"squad {seed}").shuffle(questions)
    splits = split_questions(questions, [title for title, _ in corpus_ids], test_share, num_val, split_by)
    trained = {question.question.lower() for question in splits["train"]}
    shared = sum(question.question.lower() in trained for question in splits["test"])
    print(f"test questions that are word for word among the training questions: {shared}")
    corpus = ({"id": str(i), "contents": f'"{title}"\n{text}'} for (title, text), i in corpus_ids.items())
    counts = {"corpus.jsonl": files.write_jsonl(out / "corpus.jsonl", corpus)}
    for split, subset in splits.items():
        rows = []
        for index, q in enumerate(subset):
            extra = {"gold_ids": [str(q.passage)], "source_id": q.source_id}
            prompt = prompts.fill_prompt(template, q.question)
            rows.append(files.make_row("squad", prompt, q.question, q.answers, split, index, **extra))
        if rows:
            counts[f"{split}.parquet"] = files.write_parquet(out / f"{split}.parquet", rows)
        else:
            (out / f"{split}.parquet").unlink(missing_ok=True)  # an earlier split may have left it
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="SQuAD-format files and passages -> corpus, parquet rows.")
    add = parser.add_argument
    add("--squad", type=Path, nargs="+", required=True, help="SQuAD 1.1 or 2.0 files")
    add("--passages", type=Path, nargs="*", default=[], help="JSON or JSON lines of {title, text}")
    add("--out", type=Path, required=True, help="folder to write to")
    add("--test-share", type=float, default=0.25, help="share of questions for testing (0.25)")
    add("--num-val", type=int, default=0, help="questions of training to put into val.parquet (0)")
    add("--split-by", choices=SPLITS, default="question", help="what is never in two of the files (question)")
    add("--seed", type=int, default=0, help="which questions are for testing (0)")
    help_text = "'search' explains the tags at length, 'base' in a line (for a small pretrained model; see "
    help_text += "data_prep.real_demonstrations), 'short' is what the tiny base model knows"
    add("--prompt", choices=sorted(PROMPTS), default="search", help=help_text)
    add("--template", type=Path, help="file with your own prompt, with {question} in it")

    def program(options: argparse.Namespace) -> dict[str, int]:
        template = prompts.read_template(options.template) if options.template else PROMPTS[options.prompt]
        arguments = (options.squad, options.passages, options.out, options.test_share, options.seed, template)
        return convert(*arguments, options.split_by, options.num_val)

    return files.run_command(parser, program)


if __name__ == "__main__":
    sys.exit(main())
