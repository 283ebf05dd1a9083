"""Questions and documents of your own become rows and passages, and mistakes in them are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.own_questions import Passage, main, split_document
from verl.config import load_config
from verl.data.row_check import check_small_files

QUESTIONS = [{"question": f"Who keeps lighthouse {n}?", "answer": f"Keeper {n}"} for n in range(10)]
DOCUMENTS = [{"title": f"Lighthouse {n}", "text": f"Keeper {n} keeps it."} for n in range(10)]


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def make(folder: Path, questions: list[object], *flags: str, documents: list[object] | None = None) -> int:
    line = [str(write(folder / "questions.jsonl", questions)), "--out", str(folder / "out"), *flags]
    if documents is not None:
        line += ["--documents", str(write(folder / "documents.jsonl", documents))]
    return main(line)


def test_ten_questions_become_rows_that_a_run_can_ask_and_score(tmp_path, capsys):
    assert make(tmp_path, QUESTIONS, documents=DOCUMENTS) == 0
    out = tmp_path / "out"
    assert (
        f"Train: DATA_DIR={out} BASE_MODEL=<a pretrained model> bash train_grpo.sh" in capsys.readouterr().out
    )
    train = rows(out, "train")
    test = rows(out, "test")
    assert (len(train), len(test)) == (8, 2)
    passages = {row["id"]: row["contents"] for row in rows(out, "corpus")}
    for row in train + test:
        assert row["question"] in row["prompt"][0]["content"]
        (gold_id,) = row["extra_info"]["gold_ids"]
        assert row["golden_answers"][0] in passages[gold_id]
    template = (out / "prompt_template.txt").read_text()
    assert template.replace("{question}", train[0]["question"]) == train[0]["prompt"][0]["content"]
    files = [f"data.{kind}_files={out}/{name}.jsonl" for kind, name in (("train", "train"), ("val", "test"))]
    check_small_files(load_config(files))


def test_answers_are_texts_numbers_or_lists_of_them(tmp_path):
    questions = [
        {"question": "When", "answer": 1931},
        {"question": "How much?", "answers": [2.5, "2.50"]},
        {"question": "when?", "golden_answers": ["nineteen thirty-one"]},
        {"question": "Who?", "answer": " Ann "},
    ]
    assert make(tmp_path, questions) == 0
    all_rows = rows(tmp_path / "out", "train") + rows(tmp_path / "out", "test")
    answers = {row["question"]: row["golden_answers"] for row in all_rows}
    assert answers == {
        "When?": ["1931", "nineteen thirty-one"],  # the same question, which is asked once
        "How much?": ["2.5", "2.50"],
        "Who?": ["Ann"],
    }


def test_a_folder_of_texts_is_a_corpus_and_long_ones_are_cut_at_sentences(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "Old_bridge.txt").write_text("It is old. " * 40)
    (folder / "inner" / "Mill.md").write_text("The mill is new.")
    flags = ["--documents", str(folder), "--passage-words", "50"]
    assert make(tmp_path, QUESTIONS, *flags) == 0
    contents = [row["contents"] for row in rows(tmp_path / "out", "corpus")]
    assert '"Mill"\nThe mill is new.' in contents
    bridge = [text for text in contents if text.startswith('"Old bridge"\n')]
    assert all(text.endswith("old.") and len(text.split()) <= 52 for text in bridge)
    whole = Passage("T", "one two three four five. six")
    assert [passage.text for passage in split_document(whole, 4)] == ["one two three four", "five. six"]


def test_questions_whose_answers_no_search_can_find_are_named(tmp_path, capsys):
    questions = [*QUESTIONS, {"question": "Who is lost?", "answer": "Nobody"}]
    assert make(tmp_path, questions, documents=DOCUMENTS) == 0
    said = capsys.readouterr().out
    assert "the answers of 1 of 11 questions stand in no document" in said
    assert "line 11: Who is lost?" in said


def test_without_documents_the_next_command_names_a_server(tmp_path, capsys):
    assert make(tmp_path, QUESTIONS) == 0
    assert "RETRIEVER_URL=" in capsys.readouterr().out
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Who?"}, "line 2: no 'answer'; its keys are ['question']"),
        ({"answer": "Ann"}, "line 2: no 'question'"),
        ({"question": " ", "answer": "Ann"}, "line 2: the question is empty"),
        ({"question": "Who?", "answer": []}, "line 2: 'answer' holds list []"),
        ({"question": "Who?", "answer": None}, "line 2: 'answer'"),
        ({"question": "Who?", "answer": "['a', 'b']"}, "a list as text"),
        (["Who?"], "line 2: expected an object with 'question'"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, capsys, record, message):
    assert make(tmp_path, [QUESTIONS[0], record]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"title": "A"}, "no 'text'"),
        ({"title": "A", "text": " "}, "the text is empty"),
        ({"contents": 5}, "str"),
    ],
)
def test_a_mistake_in_a_document_is_named(tmp_path, capsys, document, message):
    assert make(tmp_path, QUESTIONS, documents=[document]) == 2
    assert "documents.jsonl, line 1: " in (said := capsys.readouterr().err) and message in said
