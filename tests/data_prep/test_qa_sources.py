"""Each question set in the formats in which it is published; malformed records are named exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_prep.qa_sources import SOURCES, find_file, read_questions


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


POPQA = (
    "id\tsubj\tprop\tobj\ts_pop\tquestion\tpossible_answers\n"
    "4222362\tGeorge Rankin\toccupation\tpolitician\t142\tWhat is George Rankin's occupation?\t"
    '"[""politician"", ""political leader"", ""pol""]"\n'
)
TRIVIA = {
    "Data": [
        {
            "Question": "Who played the organ?",
            "QuestionId": "tc_1",
            "QuestionSource": "http://quiz",
            "Answer": {
                "Value": "Sunset Blvd.",
                "Aliases": ["Sunset Boulevard", "Sunset Blvd."],
                "NormalizedAliases": ["sunset boulevard", "sunset blvd", "sunset bulevard"],
            },
        },
        {"Question": "Of the hidden test set?", "QuestionId": "tc_2"},
    ]
}
HOTPOT = {
    "_id": "5a8b57f2",
    "question": "Same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Ed Wood", 0]],
    "context": [["Ed Wood", ["He was American."]]],
}
MUSIQUE = {
    "id": "3hop1__460946_294723_1",
    "question": "Who is the spouse?",
    "answer": "Miquette Giraudy",
    "answer_aliases": ["M. Giraudy"],
    "answerable": True,
}
WEB = {
    "url": "http://www.freebase.com/view/en/justin_bieber",
    "targetValue": '(list (description "Jazmyn Bieber") (description 1881) (description "5\' 9\\" (m)"))',
    "utterance": "what is the name of justin bieber brother?",
}
STRATEGY = {"qid": "e0044a", "term": "Aristotle", "question": "Did he use a laptop?", "answer": False}

PUBLISHED = [
    (
        "nq", "NQ-open.dev.jsonl", lines({"question": "when", "answer": ["1972", " 1972 ", "in 1972"]}),
        ("", "when", ["1972", "in 1972"], {}),
    ),
    (
        "triviaqa", "unfiltered-web-dev.json", json.dumps(TRIVIA),
        ("tc_1", "Who played the organ?", ["Sunset Blvd.", "Sunset Boulevard", "sunset bulevard"],
         {"QuestionSource": "http://quiz"}),
    ),
    (
        "popqa", "popQA.tsv", POPQA,
        ("4222362", "What is George Rankin's occupation?", ["politician", "political leader", "pol"],
         {"prop": "occupation", "subj": "George Rankin", "obj": "politician", "s_pop": "142"}),
    ),
    (
        "hotpotqa", "hotpot_dev_distractor_v1.json", json.dumps([HOTPOT]),
        ("5a8b57f2", "Same nationality?", ["yes"], {"type": "comparison", "level": "hard"}),
    ),
    (
        "hotpotqa", "hotpot_dev_v1_simplified.json",
        json.dumps([{"question": "Which?", "answer": "Animorphs", "type": "bridge"}]),
        ("", "Which?", ["Animorphs"], {"type": "bridge"}),
    ),
    (
        "2wikimultihopqa", "dev.json", json.dumps([HOTPOT | {"answer": "USA", "answer_id": "Q30"}]),
        ("5a8b57f2", "Same nationality?", ["USA"],
         {"type": "comparison", "level": "hard", "answer_id": "Q30"}),
    ),
    (
        "musique", "musique_ans_v1.0_dev.jsonl", lines(MUSIQUE),
        ("3hop1__460946_294723_1", "Who is the spouse?", ["Miquette Giraudy", "M. Giraudy"], {"hops": "3"}),
    ),
    (
        "bamboogle", "Bamboogle Prerelease - Sheet1.csv",
        'Question,Answer\r\n"Who, in 1990, was king?","Bond, James"\r\n',
        ("", "Who, in 1990, was king?", ["Bond, James"], {}),
    ),
    (
        "web_questions", "webquestions.examples.test.json", json.dumps([WEB]),
        ("", WEB["utterance"], ["Jazmyn Bieber", "1881", "5' 9\" (m)"], {"url": WEB["url"]}),
    ),
    (
        "strategyqa", "strategyqa_train.json", json.dumps([STRATEGY]),
        ("e0044a", "Did he use a laptop?", ["no"], {"term": "Aristotle"}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "text", "expected"), PUBLISHED, ids=[p[1] for p in PUBLISHED])
def test_a_file_as_its_authors_publish_it(tmp_path, source, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    read = read_questions(source, tmp_path / name)
    [question] = read.questions
    assert (question.source_id, question.question, question.answers, question.metadata) == expected
    assert read.num_malformed == 0


@pytest.mark.parametrize("source", SOURCES)
def test_flashrag_rows_are_read_for_every_source(tmp_path, source):
    path = tmp_path / "test.jsonl"
    metadata = {"type": "bridge", "level": 2, "context": {"title": ["A"]}}
    row = {"id": "test_0", "question": "Who?", "golden_answers": ["A", "B"], "metadata": metadata}
    path.write_text(lines(row), encoding="utf-8")
    [question] = read_questions(source, path).questions
    assert (question.source_id, question.answers) == ("test_0", ["A", "B"])
    assert question.metadata == {"type": "bridge", "level": "2"}


def test_questions_without_an_accepted_answer_are_counted(tmp_path):
    path = tmp_path / "musique_full_v1.0_dev.jsonl"
    path.write_text(lines(MUSIQUE, MUSIQUE | {"answerable": False}, {"id": "x", "question": "Who?"}))
    read = read_questions("musique", path)
    assert (len(read.questions), read.num_without_answer, read.num_malformed) == (1, 2, 0)
    path.write_text(lines(MUSIQUE | {"answerable": False}))
    with pytest.raises(ValueError, match=r"no question with an accepted answer \(1 without one\)"):
        read_questions("musique", path)


MALFORMED = [
    ("nq", "a.jsonl", '{"question": "q"', "line 2: not JSON"),
    ("nq", "a.jsonl", "[1]", r"line 2: expected an object, found list \[1\]"),
    ("nq", "a.jsonl", '{"answer": ["A"]}', r"line 2: no 'question'; its keys are \['answer'\]"),
    ("nq", "a.jsonl", '{"question": " ", "answer": ["A"]}', "line 2: the question is empty"),
    ("nq", "a.jsonl", '{"question": "q", "answer": [{}]}', "line 2: an answer must be a text, found dict"),
    ("strategyqa", "a.jsonl", '{"question": "q", "answer": "yes"}', "'answer' must be a bool, found str"),
    ("web_questions", "a.jsonl", '{"utterance": "q", "targetValue": "(list (description \\"A)"}',
     r"'targetValue' is not a list of descriptions, found str '\(list"),
    ("popqa", "a.tsv", "q\tA", "line 3: 'possible_answers' is not a JSON list"),
    ("popqa", "a.tsv", "q", "line 3: 'possible_answers' must be a str, found NoneType"),
]  # fmt: skip
GOOD = {
    "nq": lines({"question": "q", "answer": ["A"]}),
    "strategyqa": lines({"question": "q", "answer": True}),
    "web_questions": lines({"question": "q", "answers": ["A"]}),
    "popqa": 'question\tpossible_answers\nq\t"[""A""]"\n',
}


@pytest.mark.parametrize(("source", "name", "bad", "problem"), MALFORMED)
def test_a_malformed_record_is_left_out_and_named(tmp_path, source, name, bad, problem):
    path = tmp_path / name
    path.write_text(GOOD[source] + bad + "\n", encoding="utf-8")
    read = read_questions(source, path)
    assert (len(read.questions), read.num_malformed) == (1, 1)
    assert re.match(re.escape(str(path)) + ", .*" + problem, read.problems[0]), read.problems


def test_where_a_split_is_looked_for(tmp_path):
    def touch(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        return path

    touch("train.json")  # says nothing of the set: not taken for 2wikimultihopqa or strategyqa
    assert find_file("2wikimultihopqa", "train", tmp_path) is None
    beside = touch("hotpot_train_v1.1.json.gz")
    assert find_file("hotpotqa", "train", tmp_path) == beside
    inside = touch("hotpotqa/hotpot_train_v1.1.json")
    assert find_file("hotpotqa", "train", tmp_path) == inside
    flashrag = touch("hotpotqa/train.jsonl")
    assert find_file("hotpotqa", "train", tmp_path) == flashrag
    own = touch("2wikimultihopqa/train.json")
    assert find_file("2wikimultihopqa", "train", tmp_path) == own
    assert find_file("popqa", "train", tmp_path) is None
