"""scripts/eval_retrieval.py: the figures are those of a corpus whose answers are known."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from data_prep.files import make_row, write_jsonl, write_parquet

SCRIPT = Path(__file__).parents[2] / "scripts" / "eval_retrieval.py"
spec = importlib.util.spec_from_file_location("eval_retrieval", SCRIPT)
assert spec is not None and spec.loader is not None
eval_retrieval = importlib.util.module_from_spec(spec)
spec.loader.exec_module(eval_retrieval)

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


@pytest.fixture
def folder(tmp_path) -> Path:
    write_jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    rows = [make_row("x", q, q, ["-"], "test", i, gold_ids=gold) for i, (q, gold) in enumerate(GOLD)]
    write_parquet(tmp_path / "test.parquet", rows[:2])
    write_parquet(tmp_path / "train.parquet", rows[2:])
    return tmp_path


def test_a_question_counts_at_k_when_a_gold_passage_is_among_the_first_k(folder):
    # The second question's own passage comes second; "Who?" finds nothing.
    assert eval_retrieval.recall_table(folder, (1, 2)) == (3, 4, {1: 0.5, 2: 0.75})


def test_a_server_gives_the_same_figures(folder, serve_documents):
    with serve_documents(DOCUMENTS) as address:
        assert eval_retrieval.recall_table(folder, (1, 2), address)[2] == {1: 0.5, 2: 0.75}


def test_the_figures_are_printed(folder, capsys):
    assert eval_retrieval.main([str(folder), "--k", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 questions, 3 passages"
    assert [line.split()[-1] for line in lines[1:]] == ["50.0%", "75.0%"]


def test_mistakes_are_one_line_and_status_1(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert eval_retrieval.main([str(tmp_path / "empty")]) == 1
    assert eval_retrieval.main([str(folder), "--k", "0"]) == 1
    (folder / "corpus.jsonl").write_text(json.dumps(DOCUMENTS[0]) + "\n")
    assert eval_retrieval.main([str(folder)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "holds no parquet rows" in errors[0] and "--k: found 0" in errors[1] and "'b'" in errors[2]
    assert len(errors) == 3
