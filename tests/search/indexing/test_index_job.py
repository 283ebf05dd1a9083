"""Building one index: whatever is stopped or changed, an index is whole, of its corpus, or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.search.corpus import Corpus
from search_r1.search.indexing.corpus_check import check_corpus
from search_r1.search.indexing.job import IndexJob, run_job
from search_r1.search.long_work import Progress
from search_r1.search.manifest import check_manifest, manifest_path, read_manifest


def build(corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
    """A small backend that goes on from the rows that it finds: one line with each text's length."""
    path = folder / "lengths.txt"
    done = path.read_text().count("\n") if path.exists() else 0
    with path.open("a") as file:
        for row, contents in enumerate(corpus.iter_contents(done), start=done):
            file.write(f"{len(contents)}\n")
            file.flush()
            progress("lengths", row + 1, len(corpus))
    return {"total": sum(map(int, path.read_text().split()))}


def write_corpus(path: Path, letter: str = "x") -> Path:
    path.write_text("".join(f'{{"id": "{k}", "contents": "{letter * k}"}}\n' for k in range(1, 6)))
    return path


def job_in(folder: Path, kind: str = "folder", **request: Any) -> IndexJob:
    if kind == "folder":
        return IndexJob(folder / "out" / "fake", "fake", request, build, 0)
    return IndexJob(folder / "out" / "fake.index", "fake", request, build, 0, "lengths.txt")


def start(
    job: IndexJob,
    corpus: Path,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
    report: Callable[[str], None] = lambda _: None,
) -> bool:
    checked = check_corpus(corpus)
    with Corpus.open(corpus) as opened:
        return run_job(job, opened, checked, overwrite, command=["x"], progress=progress, report=report)


def assert_whole(job: IndexJob, corpus: Path) -> None:
    with Corpus.open(corpus) as opened:
        manifest = check_manifest(job.target, opened, "fake", full=True)
    assert manifest is not None and manifest.parameters == {"total": 15}
    lengths = job.target if job.target.is_file() else job.target / "lengths.txt"
    assert lengths.read_text() == "1\n2\n3\n4\n5\n"
    kept = {job.target.name, manifest_path(job.target).name} if job.file_name else {job.target.name}
    assert {path.name for path in job.target.parent.iterdir()} == kept


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_index_is_built_with_its_manifest_and_then_found(tmp_path, kind):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    job = job_in(tmp_path, kind, length=180)
    assert start(job, corpus) is True
    assert_whole(job, corpus)
    manifest = read_manifest(job.target)
    assert manifest.corpus["name"] == "corpus.jsonl" and manifest.built["request"] == {"length": 180}
    assert start(job, corpus) is False
    assert_whole(job, corpus)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_finished_index_of_something_else_is_replaced_only_when_told(tmp_path, kind):
    corpus = write_corpus(tmp_path / "corpus.jsonl", "y")
    start(job_in(tmp_path, kind, length=180), corpus)
    with pytest.raises(ValueError, match=r"built with length 180 \(now 256\): .*--overwrite"):
        start(job_in(tmp_path, kind, length=256), corpus)
    write_corpus(corpus, "z")  # the same count and size
    job = job_in(tmp_path, kind, length=180)
    with pytest.raises(ValueError, match="of another corpus .5 documents, sha256 .* 5 documents"):
        start(job, corpus)
    assert not job.work.exists()
    assert start(job, corpus, overwrite=True) is True
    assert_whole(job, corpus)


def test_what_this_program_did_not_build_is_never_overwritten(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    job = job_in(tmp_path)
    job.target.mkdir(parents=True)
    (job.target / "segments_1").write_text("lucene")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="was not built by this program"):
            start(job, corpus, overwrite)
    assert [path.name for path in job.target.parent.rglob("*")] == ["fake", "segments_1"]


def stop_at(row: int) -> Progress:
    def progress(stage: str, done: int, total: int) -> None:
        if done == row:
            raise KeyboardInterrupt

    return progress


def test_a_stopped_build_goes_on_where_it_was(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    job = job_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        start(job, corpus, progress=stop_at(3))
    assert not job.target.exists()
    rows: list[int] = []
    said: list[str] = []
    start(job, corpus, progress=lambda _, done, total: rows.append(done), report=said.append)
    assert rows == [4, 5] and said == [f"going on with {job.work}"]
    assert_whole(job, corpus)
    assert read_manifest(job.target).built["resumed"] is True


def test_a_begun_build_of_something_else_is_not_mixed_in(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", "y")
    job = job_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        start(job, corpus, progress=stop_at(3))
    with pytest.raises(ValueError, match="holds a begun index built with .*None.*180"):
        start(job_in(tmp_path, length=180), corpus)
    write_corpus(corpus, "z")
    with pytest.raises(ValueError, match="holds a begun index of another corpus"):
        start(job, corpus)
    rows: list[int] = []
    start(job, corpus, overwrite=True, progress=lambda _, done, total: rows.append(done))
    assert rows == [1, 2, 3, 4, 5]
    assert_whole(job, corpus)


def test_a_corpus_that_changes_while_the_index_is_built_gives_no_index(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", "y")
    job = job_in(tmp_path)

    def progress(stage: str, done: int, total: int) -> None:
        if done == 2:
            os.utime(write_corpus(corpus, "z"), ns=(1, 1))

    with pytest.raises(ValueError, match="was changed while the index was built"):
        start(job, corpus, progress=progress)
    assert not job.target.exists()
