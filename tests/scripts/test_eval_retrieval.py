"""scripts/eval_retrieval.py: the figures are those of a corpus whose answers are known."""

from __future__ import annotations

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
GOLD = {"Which river is Orlen on?": ["b"], "What town is Orlen?": ["b"], "Who?": ["c"], "Tomas?": ["a", "c"]}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    rows = [
        make_row("x", text, text, ["-"], "test", i, gold_ids=ids)
        for i, (text, ids) in enumerate(GOLD.items())
    ]
    write_parquet(tmp_path / "test.parquet", rows[:2])
    write_parquet(tmp_path / "train.parquet", rows[2:])
    return tmp_path


def test_a_question_counts_at_k_when_a_gold_passage_is_among_the_first_k(folder, capsys):
    # The second question's own passage comes second; "Who?" finds nothing.
    assert eval_retrieval.main([str(folder)]) == 0
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert row[:6] == ["bm25", "4", "50.0%", "75.0%", "75.0%", f"{(1 + 1 / 2 + 0 + 1) / 4:.3f}"]
    assert 0 < float(row[6]) <= float(row[7]) and float(row[8]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "bm25 --no_such_flag"], "--run: unrecognized arguments: --no_such_flag"),
        (["--run", "no_such_backend --retriever_model x"], "no_such_backend"),
        (["--run", "bm25 --corpus_path none.jsonl"], "none.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folder, capsys, options, message):
    assert eval_retrieval.main([str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_rows_without_gold_ids_are_refused(folder, capsys):
    write_parquet(folder / "test.parquet", [make_row("x", "q", "q", ["a"], "test", 0)])
    assert eval_retrieval.main([str(folder)]) == 2
    assert "test.parquet: expected rows with a question and extra_info.gold_ids" in capsys.readouterr().err
