"""SQuAD-format files and passage lists: everything arrives, and malformed input is named exactly."""

import json
from pathlib import Path

import pandas as pd
import pytest

from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT
from data_prep.squad import convert

DATA = Path(__file__).parents[3] / "shared" / "data"


def squad_file(folder, name="squad.json", **changes):
    answers = [{"text": "Here", "answer_start": 0}]
    entry = {"id": "q1", "question": "Where is it?", "answers": answers} | changes
    paragraphs = [
        {"context": "Here it is.\nIt is  here.", "qas": [entry, {**entry, "id": "q2", "question": "Where?"}]},
        {"context": "Another text.", "qas": [{**entry, "id": "q3", "question": "Which text?"}]},
    ]
    path = folder / name
    path.write_text(json.dumps({"data": [{"title": "Some_Title", "paragraphs": paragraphs}]}))
    return path


def run(folder, squad, passages=(), **options):
    settings = {"test_share": 0.34, "seed": 0, "template": SEARCH_PROMPT} | options
    return convert(squad, list(passages), folder / "out", **settings)


def rows(folder, split):
    return pd.read_parquet(folder / "out" / f"{split}.parquet").to_dict("records")


def corpus(folder):
    lines = (folder / "out" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_question_and_passage_arrives_with_its_gold_passage(tmp_path):
    passages = tmp_path / "more.json"
    passages.write_text(json.dumps([{"title": "Más", "text": "Ünïcode \u2028text"}]), encoding="utf-8")
    counts = run(tmp_path, [squad_file(tmp_path)], [passages])
    assert counts["passages"] == 3
    entries = {entry["id"]: entry["contents"] for entry in corpus(tmp_path)}
    assert entries["0"] == '"Some Title"\nHere it is. It is here.'
    assert entries["2"] == '"Más"\nÜnïcode text'
    questions = rows(tmp_path, "train") + rows(tmp_path, "test")
    assert sorted(row["question"] for row in questions) == ["Where is it?", "Where?", "Which text?"]
    for row in questions:
        assert row["question"] in row["prompt"][0]["content"]
        assert list(row["reward_model"]["ground_truth"]["target"]) == ["Here"]
        gold = entries[row["extra_info"]["gold_ids"][0]]
        assert gold.endswith("Another text.") == (row["question"] == "Which text?")


def test_unanswerable_questions_are_left_out_and_counted(tmp_path):
    impossible = squad_file(tmp_path, "b.json", is_impossible=True)
    counts = run(tmp_path, [squad_file(tmp_path), impossible])
    assert counts["unanswerable questions left out"] == 3
    assert counts["train questions"] + counts["test questions"] == 3


def test_short_prompt_is_the_tiny_models(tmp_path):
    run(tmp_path, [squad_file(tmp_path)], template=MICROWORLD_PROMPT)
    row = rows(tmp_path, "train")[0]
    assert row["prompt"][0]["content"] == f"Question: {row['question']}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": 5}, r"data\[0\].paragraphs\[0\].qas\[0\]: 'question' must be a str, found int 5"),
        ({"question": "  "}, r"qas\[0\]: the question is empty"),
        ({"answers": "Here"}, r"qas\[0\]: 'answers' must be a list, found str 'Here'"),
        ({"answers": [{"start": 3}]}, r"qas\[0\].answers\[0\]: no 'text'; its keys are \['start'\]"),
        ({"answers": ["Here"]}, r"answers\[0\]: expected an object with 'text', found str 'Here'"),
    ],
)
def test_a_malformed_question_is_named_with_its_place(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"squad.json, " + r".*" + message):
        run(tmp_path, [squad_file(tmp_path, **changes)])


def test_a_missing_file_and_a_bad_share_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        run(tmp_path, [tmp_path / "none.json"])
    with pytest.raises(ValueError, match="--test-share 1.5"):
        run(tmp_path, [squad_file(tmp_path)], test_share=1.5)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets are not in {DATA}")
def test_the_published_files_give_6359_passages(tmp_path):
    passages = [DATA / "2wikimultihopqa_corpus.json"]
    counts = run(tmp_path, [DATA / "xquad.en.json"], passages, test_share=0.25)
    assert (counts["passages"], counts["train questions"] + counts["test questions"]) == (6359, 1190)
