"""scripts/try_retrieval.py: recall and latency of running servers, and a status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep.files import make_row, write_parquet

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import try_retrieval  # noqa: E402

DOCUMENTS = [
    {"id": "a", "contents": '"Orlen"\nOrlen is a town.'},
    {"id": "b", "contents": '"Orlen Vey"\nOrlen lies on the river Vey, says Orlen.'},
    {"id": "c", "contents": '"Tomas"\nA director.'},
]
ROWS = [
    make_row("x", "p", "Which river is Orlen on?", ["-"], "test", 0, gold_ids=["b"]),
    make_row("x", "p", "What town is Orlen?", ["-"], "test", 1, gold_ids=["b"]),  # it comes second
    make_row("x", "p", "Tomas?", ["a Director"], "test", 2, gold_ids=[]),  # by its answer
    make_row("x", "p", "Zzz?", ["nobody"], "test", 3, gold_ids=[]),
]


def test_recall_and_latency_of_each_server_are_printed_and_a_small_recall_is_a_failure(
    serve_documents, tmp_path, capsys
):
    write_parquet(tmp_path / "rows.parquet", ROWS)
    with serve_documents(DOCUMENTS) as url:
        arguments = [str(tmp_path / "rows.parquet"), "--url", url, "--topk", "1,3"]
        assert try_retrieval.main(arguments) == 0
        row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
        assert row[:4] == [f"{url}/retrieve", "4", "50.0%", "75.0%"]
        assert 0 < float(row[4]) <= float(row[5])
        assert try_retrieval.main([*arguments, "--min_recall", "0.9"]) == 1
        assert "recall@3 is 75.0%, below --min_recall 0.9" in capsys.readouterr().err
        assert try_retrieval.main([*arguments, "-n", "2", "--url", f"{url},http://127.0.0.1:9"]) == 1
        printed = capsys.readouterr()
        assert "| 2 |" in printed.out and "error: http://127.0.0.1:9/retrieve: " in printed.err


@pytest.mark.parametrize(
    ("answers", "options", "said"),
    [
        ([], [], "Found no row in "),
        (["a"], ["--topk", "0"], "expected numbers of 1 or more"),
        (["a"], ["--url", "here"], "found 'here', expected an address"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path, capsys, answers, options, said):
    write_parquet(tmp_path / "rows.parquet", [make_row("x", "p", "Who?", answers, "test", 0)])
    assert try_retrieval.main([str(tmp_path / "rows.parquet"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
