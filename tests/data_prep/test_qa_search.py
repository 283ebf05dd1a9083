"""Merging question sets: unique ids and indexes, Search-R1's rows, splits, overlap, and the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hub_stand_in import Hub, serve

from data_prep import qa_search
from data_prep.prompts import SEARCH_PROMPT
from data_prep.qa_sources import SOURCES
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import EXACT_MATCH_SOURCES, default_compute_score

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str, *rows: dict) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def flashrag_rows(split: str, *questions: str) -> list[dict]:
    return [
        {"id": f"{split}_{i}", "question": question, "golden_answers": [f"answer {i}", "other"]}
        for i, question in enumerate(questions)
    ]


@pytest.fixture
def raw(tmp_path) -> Path:
    """All nine sets in FlashRAG's layout, with the splits that the collection has."""
    folder = tmp_path / "raw"
    splits = {
        "nq": "train dev test", "triviaqa": "train dev test", "popqa": "test", "hotpotqa": "train dev",
        "2wikimultihopqa": "train dev", "musique": "train dev", "bamboogle": "test",
        "web_questions": "train test", "strategyqa": "train",
    }  # fmt: skip
    for source, names in splits.items():
        for split in names.split():
            rows = flashrag_rows(split, f" who of {source} is {split} zero", f"which {source} {split} one?")
            write(folder, f"{source}/{split}.jsonl", *rows)
    return folder


def run(*arguments: object) -> None:
    qa_search.main([str(argument) for argument in arguments])


def rows(folder: Path, split: str) -> pd.DataFrame:
    return pd.read_parquet(folder / f"{split}.parquet")


def test_a_row_has_search_r1s_schema(raw, tmp_path):
    run("--raw_dir", raw, "--local_dir", tmp_path, "--split", "test", "--data_sources", "popqa")
    row = rows(tmp_path, "test").to_dict("records")[0]
    question = "who of popqa is test zero?"
    assert row["prompt"][0] == {
        "role": "user",
        "content": SEARCH_PROMPT.replace("{question}", question),
    }
    target = row["reward_model"]["ground_truth"].pop("target")
    assert list(target) == list(row["golden_answers"]) == ["answer 0", "other"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": {}}
    assert row["extra_info"] == {"split": "test", "index": 0}
    assert row["metadata"] == {"source_id": "test_0"}
    assert [row[key] for key in ("id", "question", "data_source", "ability")] == [
        "popqa_test_0", question, "popqa", "fact-reasoning",
    ]  # fmt: skip


class CharacterTokenizer:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


def test_rows_of_all_nine_sources_go_straight_into_training(raw, tmp_path):
    run("--raw_dir", raw, "--local_dir", tmp_path, "--split", "test", "--data_sources", ",".join(SOURCES))
    config = {
        "prompt_key": "prompt",
        "truncation": "error",
        "max_prompt_length": 2000,
        "max_start_length": 2000,
        "return_raw_chat": False,
    }
    dataset = RLHFDataset(str(tmp_path / "test.parquet"), CharacterTokenizer(), config)
    assert len(dataset) == 18
    assert set(EXACT_MATCH_SOURCES) == set(SOURCES)
    for number in range(len(dataset)):
        item = dataset[number]
        assert item["extra_info"]["index"] == number
        truth = item["reward_model"]["ground_truth"]
        assert default_compute_score(item["data_source"], "<answer> Other </answer>", truth) == 1.0
        assert default_compute_score(item["data_source"], "<answer> no </answer>", truth) == 0.0


def test_the_overlap_with_the_test_set_is_told_and_left_out_on_demand(tmp_path, capsys):
    raw = tmp_path / "raw"
    write(raw, "nq/train.jsonl", *flashrag_rows("train", "Who is the King?", "who was it", "where"))
    write(raw, "nq/test.jsonl", *flashrag_rows("test", "who is King", "when?"))
    options = ["--raw_dir", raw, "--local_dir", tmp_path, "--data_sources", "nq", "--split"]
    run(*options, "train")
    assert "not compared with a test set" in capsys.readouterr().out
    run(*options, "test")
    run(*options, "train")
    assert "1 questions that the test set asks too (stay in" in capsys.readouterr().out
    assert len(rows(tmp_path, "train")) == 3
    run(*options, "train", "--drop_overlap")
    assert "(left out)" in capsys.readouterr().out
    kept = rows(tmp_path, "train")
    assert list(kept.question) == ["who was it?", "where?"]
    assert [extra["index"] for extra in kept.extra_info] == [0, 1]


def test_malformed_records_are_reported_with_file_and_line(raw, tmp_path, capsys):
    path = raw / "nq" / "test.jsonl"
    path.write_text(path.read_text() + '{"question": 5, "golden_answers": ["A"]}\n')
    run("--raw_dir", raw, "--local_dir", tmp_path, "--split", "test", "--data_sources", "nq")
    out = capsys.readouterr().out
    assert "1 malformed records left out" in out
    assert f"{path}, line 3: 'question' must be a str, found int 5" in out


def test_the_prompt_may_have_any_words(raw, tmp_path):
    options = ["--raw_dir", raw, "--local_dir", tmp_path, "--split", "test", "--data_sources", "nq"]
    (tmp_path / "mine.txt").write_text("Mine {x}: {question}!")
    for flags, expected in (
        (["--template_type", "short"], "Question: {}\n"),
        (["--template", tmp_path / "mine.txt"], "Mine {{x}}: {}!"),
    ):
        run(*options, *flags)
        content = rows(tmp_path, "test").prompt[0][0]["content"]
        assert content == expected.format("who of nq is test zero?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data_sources", "nq"], "--data_sources needs --split train or test"),
        (["--split", "test", "--data_sources", "nq,squad"], "found 'squad', expected some of nq, triviaqa"),
        (["--split", "test", "--data_sources", "nq,nq"], "names a source twice"),
        (["--split", "train", "--data_sources", "popqa"], "found no train file of popqa"),
        (["--split", "test", "--data_sources", "nq", "--drop_overlap"], "--drop_overlap takes"),
        (["--split", "test", "--data_sources", "nq", "--template_type", "rag"], "rag needs --retriever_url"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(raw, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        run("--raw_dir", raw, "--local_dir", tmp_path / "out", *options)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def from_hub(endpoint: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own: the hub's address is read once, when its package is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hub"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "data_prep.qa_search", "--local_dir", str(folder / "out"), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_without_files_the_sets_come_from_the_hub(raw, tmp_path):
    files = {str(path.relative_to(raw)): path.read_bytes() for path in raw.rglob("*.jsonl")}
    options = ["--split", "test", "--data_sources", "nq,hotpotqa,strategyqa"]
    with serve(Hub({qa_search.REPOSITORY: files})) as hub:
        done = from_hub(hub.address, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert list(rows(tmp_path / "out", "test").question) == [
        "who of nq is test zero?", "which nq test one?", "who of hotpotqa is dev zero?",
        "which hotpotqa dev one?", "who of strategyqa is train zero?", "which strategyqa train one?",
    ]  # fmt: skip
