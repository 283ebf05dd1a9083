"""scripts/eval_retrieval.py: the figures are those of a corpus whose answers are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_prep.files import make_row, write_jsonl, write_parquet

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import eval_retrieval  # noqa: E402

DOCUMENTS = [
    {"id": "a", "contents": '"Orlen"\nOrlen is a town.'},
    {"id": "b", "contents": '"Orlen Vey"\nOrlen lies on the river Vey, says Orlen.'},
    {"id": "c", "contents": '"Tomas"\nA director.'},
]
GOLD = [
    ("Which river is Orlen on?", ["b"]),
    ("What town is Orlen?", ["b"]),
    ("Who?", ["c"]),
    ("Tomas?", ["a", "c"]),
]


def write_questions(path: Path, questions: list, gold: bool) -> Path:
    rows = []
    for index, (question, right) in enumerate(questions):
        extra = {"gold_ids": right} if gold else {}
        rows.append(make_row("x", question, question, ["-"] if gold else right, "test", index, **extra))
    write_parquet(path, rows)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    write_jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    write_questions(tmp_path / "test.parquet", GOLD[:2], gold=True)
    write_questions(tmp_path / "train.parquet", GOLD[2:], gold=True)
    return tmp_path


def run(folder: Path, *options: object) -> list[dict]:
    out = folder / "figures.json"
    assert eval_retrieval.main([str(folder), "--json", str(out), *map(str, options)]) == 0
    return json.loads(out.read_text())


def test_a_question_counts_at_k_when_a_gold_passage_is_among_the_first_k(folder):
    # The second question's own passage comes second; "Who?" finds nothing.
    [row] = run(folder, "--k", 1, 2)
    assert (row["backend"], row["measure"], row["num_questions"]) == ("bm25", "gold passage", 4)
    assert row["recall"] == {"1": 0.5, "2": 0.75}
    assert row["mrr"] == pytest.approx((1 + 1 / 2 + 0 + 1) / 4)
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["queries_per_cpu_second"] > 0


MISTAKES = [
    (["--k", "0"], "--k: found 0"),
    (["--run", "--index_path x"], "expected a retriever's name and then its flags"),
    (["--run", "bm25 --no_such_flag"], "--run: unrecognized arguments: --no_such_flag"),
    (["--run", "no_such_backend --retriever_model x"], "no_such_backend"),
    (["--questions", "none.parquet"], "none.parquet: can't be read"),
    (["--corpus_path", "none.jsonl"], "none.jsonl"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_one_line_and_status_1(folder, capsys, options, message):
    assert eval_retrieval.main([str(folder), *options]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
