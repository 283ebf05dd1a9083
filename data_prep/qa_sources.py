"""The nine question sets of Search-R1's experiments, as their authors publish them or as FlashRAG does.

    file -> read_questions(source, path) -> Questions: what was read, what was left out and why

A source is a name (the rows' `data_source`), the file names under which each split is published, and a
function that turns one record into a question. A record with `golden_answers` is FlashRAG's, for any source.
Records without an accepted answer (hidden test sets, MuSiQue's unanswerable ones) are counted and left out;
malformed ones are left out and reported with their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.records import Malformed, describe, read_records, read_text, take
from verl.utils.reward_score.qa_em import normalize_answer

MAX_PROBLEMS = 10  # told in full; the rest is counted


@dataclass(frozen=True)
class Question:
    """One question: its id in the file it comes from, the accepted answers, and short facts about it."""

    source_id: str
    question: str
    answers: list[str]
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Questions:
    """What a file held. `problems` says file, place and what was found for the first malformed records."""

    path: Path
    questions: list[Question] = field(default_factory=list)
    num_malformed: int = 0
    num_without_answer: int = 0
    problems: list[str] = field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        self.num_malformed += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


Parse = Callable[[dict[str, Any], str], Question]


def tidy_answers(values: Any, where: str) -> list[str]:
    """Accepted answers as distinct texts; one value or a list of them, truth values as yes and no."""
    answers = []
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: an answer must be a text, found {describe(value)}")
        answers.append(str(value).strip())
    return list(dict.fromkeys(answer for answer in answers if answer))


def short_facts(record: dict[str, Any], *keys: str) -> dict[str, str]:
    """Those of the keys that the record has, as texts."""
    return {key: str(record[key]) for key in keys if isinstance(record.get(key), str | int | float | bool)}


def _listed(record: dict[str, Any], key: str, where: str) -> list[Any]:
    """The list at a key; empty where the key is missing or null."""
    return [] if record.get(key) is None else take(record, key, list, where)


def parse_flashrag(record: dict[str, Any], where: str) -> Question:
    """{"id", "question", "golden_answers": [...], "metadata": {...}}"""
    metadata = record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{where}: 'metadata' must be an object, found {describe(metadata)}")
    return Question(
        str(record.get("id", "")),
        take(record, "question", str, where),
        tidy_answers(record["golden_answers"], where),
        short_facts(metadata, *metadata),
    )


def parse_nq(record: dict[str, Any], where: str) -> Question:
    """NQ-open: {"question", "answer": [...]}"""
    answers = record.get("answer", [])  # the hidden test set has none
    return Question("", take(record, "question", str, where), tidy_answers(answers, where))


def parse_triviaqa(record: dict[str, Any], where: str) -> Question:
    """{"Question", "QuestionId", "Answer": {"Value", "Aliases", "NormalizedAliases"}}"""
    answers: list[str] = []
    if "Answer" in record:
        answer = take(record, "Answer", dict, where)
        aliases = _listed(answer, "Aliases", where)
        answers = tidy_answers([take(answer, "Value", str, where), *aliases], where)
        # Most are what exact match makes of the aliases anyway; some spell an answer in another way.
        known = {normalize_answer(text) for text in answers}
        more = tidy_answers(_listed(answer, "NormalizedAliases", where), where)
        answers += [text for text in more if normalize_answer(text) not in known]
    facts = short_facts(record, "QuestionSource")
    question = take(record, "Question", str, where)
    return Question(str(record.get("QuestionId", "")), question, answers, facts)


def parse_popqa(record: dict[str, Any], where: str) -> Question:
    """A row of popQA.tsv: id, question, possible_answers (a JSON list as text), prop, subj, s_pop, ..."""
    answers = take(record, "possible_answers", str, where)
    try:
        decoded = json.loads(answers)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: 'possible_answers' is not a JSON list ({error.msg}), found {describe(answers)}"
        ) from None
    facts = short_facts(record, "prop", "subj", "obj", "s_pop", "o_pop")
    question = take(record, "question", str, where)
    return Question(str(record.get("id", "")), question, tidy_answers(decoded, where), facts)


def parse_hotpotqa(record: dict[str, Any], where: str) -> Question:
    """{"_id", "question", "answer", "type", "level"}; also 2WikiMultihopQA's, which adds "answer_id" """
    facts = short_facts(record, "type", "level", "answer_id")
    answers = tidy_answers(record.get("answer", []), where)
    return Question(str(record.get("_id", "")), take(record, "question", str, where), answers, facts)


def parse_musique(record: dict[str, Any], where: str) -> Question:
    """{"id": "2hop__..", "question", "answer", "answer_aliases", "answerable"}"""
    aliases = _listed(record, "answer_aliases", where)
    answers = tidy_answers([record["answer"], *aliases], where) if "answer" in record else []
    if record.get("answerable") is False:
        answers = []
    identifier = str(record.get("id", ""))
    hops = re.match(r"\d", identifier)
    facts = {"hops": hops.group()} if hops else {}
    return Question(identifier, take(record, "question", str, where), answers, facts)


def parse_bamboogle(record: dict[str, Any], where: str) -> Question:
    """A row of the table: Question, Answer"""
    answers = tidy_answers(take(record, "Answer", str, where), where)
    return Question("", take(record, "Question", str, where), answers)


DESCRIPTION = re.compile(r'\(description\s+(?:"((?:[^"\\]|\\.)*)"|([^()"]*))\)')


def parse_web_questions(record: dict[str, Any], where: str) -> Question:
    """{"utterance", "targetValue": '(list (description "..") ...)'}, or {"question", "answers"}"""
    facts = short_facts(record, "url")
    if "utterance" not in record:
        answers = tidy_answers(take(record, "answers", list, where), where)
        return Question("", take(record, "question", str, where), answers, facts)
    target = take(record, "targetValue", str, where)
    answers = [re.sub(r"\\(.)", r"\1", quoted) or bare for quoted, bare in DESCRIPTION.findall(target)]
    if len(answers) != target.count("(description"):
        raise ValueError(f"{where}: 'targetValue' is not a list of descriptions, found {describe(target)}")
    return Question("", take(record, "utterance", str, where), tidy_answers(answers, where), facts)


def parse_strategyqa(record: dict[str, Any], where: str) -> Question:
    """{"qid", "question", "answer": true or false, "term"}; no answer in the test set"""
    answers = tidy_answers(take(record, "answer", bool, where), where) if "answer" in record else []
    facts = short_facts(record, "term")
    return Question(str(record.get("qid", "")), take(record, "question", str, where), answers, facts)


@dataclass(frozen=True)
class Source:
    """How a question set is published: for each split its file names, the preferred one first."""

    parse: Parse
    files: dict[str, tuple[str, ...]]


SOURCES = {
    "nq": Source(parse_nq, {"train": ("NQ-open.train.jsonl",), "test": ("NQ-open.dev.jsonl",)}),
    "triviaqa": Source(
        parse_triviaqa, {"train": ("unfiltered-web-train.json",), "test": ("unfiltered-web-dev.json",)}
    ),
    "popqa": Source(parse_popqa, {"test": ("popQA.tsv", "popqa.tsv", "popqa.csv", "test.tsv")}),
    "hotpotqa": Source(
        parse_hotpotqa,
        {
            "train": ("hotpot_train_v1.1.json",),
            "dev": (
                "hotpot_dev_distractor_v1.json",
                "hotpot_dev_fullwiki_v1.json",
                "hotpot_dev_v1_simplified.json",
            ),
        },
    ),
    "2wikimultihopqa": Source(parse_hotpotqa, {"train": ("train.json",), "dev": ("dev.json",)}),
    "musique": Source(
        parse_musique,
        {
            "train": ("musique_ans_v1.0_train.jsonl", "musique_full_v1.0_train.jsonl"),
            "dev": ("musique_ans_v1.0_dev.jsonl", "musique_full_v1.0_dev.jsonl"),
        },
    ),
    "bamboogle": Source(parse_bamboogle, {"test": ("Bamboogle Prerelease - Sheet1.csv", "bamboogle.csv")}),
    "web_questions": Source(
        parse_web_questions,
        {
            "train": ("webquestions.examples.train.json", "train-00000-of-00001.parquet", "train.parquet"),
            "test": ("webquestions.examples.test.json", "test-00000-of-00001.parquet", "test.parquet"),
        },
    ),
    "strategyqa": Source(
        parse_strategyqa,
        {"train": ("strategyqa_train.json", "train.json"), "dev": ("strategyqa_dev.json", "dev.json")},
    ),
}
"""The authors' test set counts as `test` where its answers are known. NQ-open's and TriviaQA's development
sets are the test sets, as in FlashRAG and in open-domain work before it."""

GENERIC = re.compile(r"(train|dev|test)\b")  # names that say nothing of the set: only in a folder of its own


def read_questions(source: str, path: Path) -> Questions:
    """The questions of one file.

    Raises ValueError where the file can't be read, holds no question, or more malformed records than good
    ones: then it is another file than its name says.
    """
    parse = SOURCES[source].parse
    result = Questions(path)
    aliases = _entity_aliases(path.parent / "id_aliases.json") if source == "2wikimultihopqa" else {}
    for where, record in read_records(path):
        try:
            question = _parse_record(record, where, parse)
        except ValueError as error:
            result.add_problem(str(error))
            continue
        more = aliases.get(question.metadata.get("answer_id", ""), [])
        if question.answers:
            answers = list(dict.fromkeys([*question.answers, *more]))
            result.questions.append(
                Question(question.source_id, question.question, answers, question.metadata)
            )
        else:
            result.num_without_answer += 1
    if result.num_malformed > len(result.questions) + result.num_without_answer:
        raise ValueError(
            f"{path}: {result.num_malformed} of its records are not {source}'s; the first: "
            + result.problems[0]
        )
    if not result.questions:
        raise ValueError(
            f"{path}: no question with an accepted answer ({result.num_without_answer} without one)"
        )
    return result


def _parse_record(record: Any, where: str, parse: Parse) -> Question:
    if isinstance(record, Malformed):
        raise ValueError(f"{where}: {record.reason}")
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, found {describe(record)}")
    question = (parse_flashrag if "golden_answers" in record else parse)(record, where)
    if not question.question.strip():
        raise ValueError(f"{where}: the question is empty")
    return question


def _entity_aliases(path: Path) -> dict[str, list[str]]:
    """Wikidata id -> other names that the authors' evaluation accepts. JSON lines, in spite of the suffix."""
    if not path.is_file():
        return {}
    names = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                names[row["Q_id"]] = [*row["aliases"], *row["demonyms"]]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected Q_id, aliases and demonyms, found {describe(line)}"
                ) from error
    return names


def find_file(source: str, split: str, folder: Path) -> Path | None:
    """A split's file: FlashRAG's (nq/test.jsonl), or one of the authors' names, in nq/ or in the folder."""
    places = [(folder / source, f"{split}.jsonl")]
    for name in SOURCES[source].files.get(split, ()):
        places.append((folder / source, name))
        if not GENERIC.match(name):
            places.append((folder, name))
    for place, name in places:
        for suffix in ("", ".gz", ".bz2"):
            if (place / (name + suffix)).is_file():
                return place / (name + suffix)
    return None
