"""The check before a build: every broken line and double id is found, named by its line, and counted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from search_r1.search import corpus as corpus_module
from search_r1.search.corpus import Corpus
from search_r1.search.indexing.corpus_check import Faults, check_corpus


def line(identifier: object, contents: str = "text") -> str:
    return json.dumps({"id": identifier, "contents": contents})


@pytest.fixture
def write(tmp_path):
    def write_file(data: str) -> Path:
        path = tmp_path / "corpus.jsonl"
        path.write_text(data, encoding="utf-8")
        return path

    return write_file


def test_a_good_corpus_has_no_problems_and_its_hash(write):
    path = write("\ufeff" + "\n\n".join(line(str(k)) for k in range(50)) + '\n{"contents": "no id"}\n' * 2)
    report = check_corpus(path)
    assert (report.num_documents, report.num_bytes) == (52, path.stat().st_size)
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == Corpus.open(path).sha256()
    assert report.broken_lines == report.duplicate_ids == report.empty_documents == Faults()


def broken_corpus() -> str:
    """1,000 lines in pairs with a blank one between; faults at known lines."""
    lines = [line(k, f"text {k}") for k in range(1000)]
    lines[3] = '{"id": 3, "contents": '
    lines[500] = line(7)
    lines[501] = line("7")
    lines[700] = '{"id": 700, "text": "x"}'
    lines[701] = line(701, " \n")
    lines[999] = line("998")
    return "\n\n".join(lines)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_faults_are_named_by_their_line_and_counted(write, monkeypatch, chunk):
    monkeypatch.setattr(corpus_module, "READ_BYTES", chunk)
    report = check_corpus(write(broken_corpus()))
    assert [text.split(":")[0] for text in report.broken_lines.named] == ["line 7", "line 1401"]
    assert "not valid JSON" in report.broken_lines.named[0]
    assert "'contents', found 'id', 'text'" in report.broken_lines.named[1]
    assert report.duplicate_ids.named == [
        "line 1001: the id '7' is at line 15 already",
        "line 1003: the id '7' is at line 15 already",
        "line 1999: the id '998' is at line 1997 already",
    ]
    assert report.empty_documents.named == ["line 1403: the contents are empty"]
    assert (report.broken_lines.count, report.duplicate_ids.count, report.empty_documents.count) == (2, 3, 1)


def test_a_corpus_that_changes_during_the_check_is_refused(write):
    path = write("\n".join(line(k) for k in range(1000)))

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "checking the corpus":
            path.write_text(path.read_text().replace("text", "TEXT"))

    with pytest.raises(ValueError, match="was changed while it was checked"):
        check_corpus(path, progress)
