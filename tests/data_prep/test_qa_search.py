"""The scripts of Search-R1's scripts/data_process start with its flags and write its rows.

What is expected here was read from Search-R1's scripts/data_process/nq.py, nq_rag.py, nq_search.py,
qa_search_train_merge.py and qa_search_test_merge.py at commit a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06: flags
with their defaults, and the `data` of `process_fn`, which each row of the parquet files holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from data_prep.qa_search import SCRIPTS, TEST_SOURCES, build_parser, main

ROOT = Path(__file__).parents[2]
NAMES = ["nq", "nq_rag", "nq_search", "qa_search_train_merge", "qa_search_test_merge"]
QUESTIONS = {"train": [" who is it", "what is it?"], "test": ["when was it "]}


@pytest.fixture
def raw(tmp_path) -> Path:
    """FlashRAG's files of nq and hotpotqa (which has a dev split and no test split)."""
    folder = tmp_path / "raw"
    for source in ("nq", "hotpotqa"):
        (folder / source).mkdir(parents=True)
        for split, questions in QUESTIONS.items():
            name = "dev" if (source, split) == ("hotpotqa", "test") else split
            rows = [
                {
                    "id": f"{name}_{number}",
                    "question": question,
                    "golden_answers": [f"{source} {number}", "b"],
                }
                for number, question in enumerate(questions)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / source / f"{name}.jsonl").write_text(text)
    return folder


def expected_row(source: str, split: str, index: int) -> dict:
    """`data` of their process_fn, without the prompt's words."""
    return {
        "data_source": source,
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"{source} {index}", "b"]}},
        "extra_info": {"split": split, "index": index},
    }


def rows_of(path: Path) -> list[dict]:
    return json.loads(pd.read_parquet(path).to_json(orient="records"))


def assert_rows(path: Path, split: str, sources: list[str], words: str = "") -> None:
    rows = rows_of(path)
    places = [(source, index) for source in sources for index in range(len(QUESTIONS[split]))]
    assert len(rows) == len(places)
    for row, (source, index) in zip(rows, places, strict=True):
        for key, value in expected_row(source, split, index).items():
            assert row[key] == value, key
        [message] = row["prompt"]
        question = QUESTIONS[split][index].strip().removesuffix("?") + "?"
        assert message["role"] == "user" and question in message["content"] and words in message["content"]
        assert row["question"] == question
        assert row["golden_answers"] == [f"{source} {index}", "b"]


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_and_their_defaults_are_search_r1s(name):
    words = ["--template_type", "base"]
    if name == "nq_rag":
        words += ["--topk", "3", "--corpus_path", "c.jsonl"]
        words += ["--train_retrieval_cache", "a.json", "--test_retrieval_cache", "b.json"]
    options = build_parser(name).parse_args(words)
    folders = {"nq": "data/nq", "nq_rag": "data/nq_rag"}
    assert options.local_dir == Path(folders.get(name, "data/nq_search"))
    assert options.hdfs_dir is None
    if name.startswith("qa_search"):
        assert options.data_sources == "nq"
    assert set(SCRIPTS) == {"qa_search", *NAMES}


@pytest.mark.parametrize("name", ["nq", "nq_search"])
def test_nq_becomes_both_files(raw, tmp_path, name):
    assert main(name, ["--raw_dir", str(raw), "--local_dir", str(tmp_path)]) == 0
    for split in ("train", "test"):
        assert_rows(tmp_path / f"{split}.parquet", split, ["nq"])
        content = rows_of(tmp_path / f"{split}.parquet")[0]["prompt"][0]["content"]
        assert ("<search>" in content) == (name == "nq_search") and "<answer>" in content


@pytest.mark.parametrize("split", ["train", "test"])
def test_several_sources_are_merged_each_counted_from_zero(raw, tmp_path, split):
    words = ["--raw_dir", str(raw), "--local_dir", str(tmp_path), "--data_sources", "nq,hotpotqa"]
    assert main(f"qa_search_{split}_merge", words) == 0
    assert_rows(tmp_path / f"{split}.parquet", split, ["nq", "hotpotqa"])
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_rag_prompts_hold_the_passages_of_the_cache(raw, tmp_path):
    corpus = [{"id": str(number), "contents": f'"Title {number}"\nText {number}'} for number in range(5)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
    words = ["--raw_dir", str(raw), "--local_dir", str(tmp_path), "--topk", "2"]
    words += ["--corpus_path", str(tmp_path / "corpus.jsonl")]
    for split, questions in QUESTIONS.items():
        cache = {question: [{"id": "4"}, {"id": "1"}, {"id": "0"}] for question in questions}
        (tmp_path / f"{split}.json").write_text(json.dumps(cache))
        words += [f"--{split}_retrieval_cache", str(tmp_path / f"{split}.json")]
    assert main("nq_rag", words) == 0
    passages = 'Doc 1(Title: "Title 4") Text 4\nDoc 2(Title: "Title 1") Text 1\n'
    assert_rows(tmp_path / "train.parquet", "train", ["nq"], passages)


def test_a_template_gives_the_prompt_any_words(raw, tmp_path):
    (tmp_path / "mine.txt").write_text("Answer this, {as} you like: {question}\nNow.")
    words = ["--raw_dir", str(raw), "--local_dir", str(tmp_path), "--template", str(tmp_path / "mine.txt")]
    assert main("nq_search", words) == 0
    contents = [row["prompt"][0]["content"] for row in rows_of(tmp_path / "train.parquet")]
    assert contents == [f"Answer this, {{as}} you like: {text} is it?\nNow." for text in ("who", "what")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hdfs_dir", "hdfs://x"], "--hdfs_dir: there is no HDFS here"),
        (["--data_sources", "nq,squad"], "--data_sources: found 'squad', expected some of nq"),
        (["--template", "{tmp}/none.txt"], "--template: "),
        (["--template", "{tmp}/bad.txt"], "no {question} in it"),
        (["--data_sources", "popqa"], "has no popqa/train.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(raw, tmp_path, capsys, words, message):
    (tmp_path / "bad.txt").write_text("nothing")
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    out = tmp_path / "out"
    assert main("qa_search_train_merge", ["--raw_dir", str(raw), "--local_dir", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not out.exists()


def test_search_r1s_whole_sets_are_written_at_once(tmp_path):
    for source in TEST_SOURCES:
        for split in ("train", "test"):
            file = tmp_path / "raw" / source / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            # an id twice, facts that are texts, lists and objects, and a record without an answer
            rows = [{"id": "x", "question": "q", "golden_answers": answers} for answers in (["a"], "b", [])]
            rows[0]["metadata"] = {"type": "bridge", "level": 2, "context": {"title": ["A"]}}
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main("qa_search", ["--raw_dir", str(tmp_path / "raw"), "--local_dir", str(tmp_path)]) == 0
    for split, sources in (("train", ("nq", "hotpotqa")), ("test", TEST_SOURCES)):
        rows = rows_of(tmp_path / f"{split}.parquet")
        assert [row["data_source"] for row in rows] == [source for source in sources for _ in range(2)]
        assert [row["id"] for row in rows[:2]] == ["nq_x", "nq_x#2"]
        assert [row["golden_answers"] for row in rows[:2]] == [["a"], ["b"]]
        assert rows[0]["metadata"] == {"source_id": "x", "type": "bridge", "level": "2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"', "line 2: not JSON"),
        ("[1]", "line 2: expected an object with 'question', found list [1]"),
        ('{"golden_answers": ["A"]}', "line 2: no 'question'; its keys are ['golden_answers']"),
        ('{"question": " ", "golden_answers": ["A"]}', "line 2: the question is empty"),
        ('{"question": "q", "golden_answers": [{}]}', "line 2: an answer must be a text, found dict {}"),
    ],
)
def test_a_malformed_record_is_named_with_its_place(raw, tmp_path, capsys, line, message):
    path = raw / "nq" / "train.jsonl"
    path.write_text('{"question": "q", "golden_answers": ["A"]}\n' + line + "\n")
    assert main("nq", ["--raw_dir", str(raw), "--local_dir", str(tmp_path)]) == 2
    assert f"error: {path}, {message}" in capsys.readouterr().err


def test_without_a_folder_the_files_come_from_the_hub(raw, tmp_path, monkeypatch):
    def download(repository: str, path: str, *, repo_type: str, local_dir: None) -> str:
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        assert repo_type == "dataset"
        if not path.startswith("nq"):
            raise LocalEntryNotFoundError("no connection to https://x/y?Signature=secret\nand no such file")
        if not (raw / path).exists():
            raise EntryNotFoundError("404")
        return str(raw / path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert main("nq", ["--local_dir", str(tmp_path)]) == 0
    assert_rows(tmp_path / "train.parquet", "train", ["nq"])


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_start_by_their_path(name, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "data_process" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--local_dir" in done.stdout, done.stderr
