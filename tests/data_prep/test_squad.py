"""SQuAD-format files and passage lists: everything arrives, and malformed input is named exactly."""

import json
from pathlib import Path

import pandas as pd
import pytest

from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT
from data_prep.squad import convert

DATA = Path(__file__).parents[3] / "shared" / "data"


def squad_file(folder, name="squad.json", title="Some_Title", **changes):
    answers = [{"text": "Here", "answer_start": 0}]
    entry = {"id": "q1", "question": "Where is it?", "answers": answers} | changes
    paragraphs = [
        {"context": "Here it is.\nIt is  here.", "qas": [entry, {**entry, "id": "q2", "question": "Where?"}]},
        {"context": "Another text.", "qas": [{**entry, "id": "q3", "question": "Which text?"}]},
    ]
    path = folder / name
    path.write_text(json.dumps({"data": [{"title": title, "paragraphs": paragraphs}]}))
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
    assert counts == {"corpus.jsonl": 3, "train.parquet": 2, "test.parquet": 1}
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


def test_unanswerable_questions_are_left_out_and_counted(tmp_path, capsys):
    impossible = squad_file(tmp_path, "b.json", is_impossible=True)
    counts = run(tmp_path, [squad_file(tmp_path), impossible])
    assert "unanswerable questions left out: 3\n" in capsys.readouterr().out
    assert counts["train.parquet"] + counts["test.parquet"] == 3


def test_short_prompt_is_the_tiny_models(tmp_path):
    run(tmp_path, [squad_file(tmp_path)], template=MICROWORLD_PROMPT)
    row = rows(tmp_path, "train")[0]
    assert row["prompt"][0]["content"] == f"Question: {row['question']}\n"


@pytest.mark.parametrize(("split_by", "num_groups"), [("passage", 20), ("article", 10)])
def test_no_group_of_questions_is_in_two_files(tmp_path, capsys, split_by, num_groups):
    squad = [squad_file(tmp_path, f"{a}.json", title=f"Title {a}") for a in range(10)]
    counts = run(tmp_path, squad, test_share=0.3, split_by=split_by, num_val=3)
    assert 9 <= counts["test.parquet"] <= 11 and 3 <= counts["val.parquet"] <= 5
    titles = [entry["contents"].split("\n")[0] for entry in corpus(tmp_path)]
    parts = {name: rows(tmp_path, name) for name in ("train", "test", "val")}
    groups = []
    for part in parts.values():
        gold = {int(row["extra_info"]["gold_ids"][0]) for row in part}
        groups += gold if split_by == "passage" else {titles[passage] for passage in gold}
    assert len(groups) == len(set(groups)) == num_groups
    asked = {row["question"] for row in parts["train"]}
    shared = sum(row["question"] in asked for row in parts["test"])  # all articles have the same questions
    assert shared > 0 and f"among the training questions: {shared}\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"--split-by {split_by}.* leave none for training"):
        run(tmp_path, squad, test_share=0.9, split_by=split_by, num_val=9)
    run(tmp_path, squad, seed=1)
    assert not (tmp_path / "out" / "val.parquet").exists(), "one of an earlier run would be in training now"


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
    assert (counts["corpus.jsonl"], counts["train.parquet"] + counts["test.parquet"]) == (6359, 1190)
