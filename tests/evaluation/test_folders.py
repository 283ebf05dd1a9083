"""Which checkpoints of a run are measured."""

import fcntl
import shutil
import threading

import pytest
from huggingface_hub import constants as hub_constants

from verl.evaluation import program
from verl.evaluation.program import build_parser, folders_of, read_options, relative_results_path


def options(run, *flags):
    (run.parent / "rows.jsonl").write_text("{}\n")
    given = ["--model", str(run), "--benchmarks", str(run.parent / "rows.jsonl"), *flags]
    return read_options(build_parser("evaluate", None, "evals"), given)


def checkpoint(run, step):
    folder = run / f"global_step_{step}" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    return tmp_path / "run"


def steps(folders):
    return [
        int(relative_results_path(folder, str(folder)).name.removeprefix("global_step_"))
        for folder in folders
    ]


def test_the_newest_all_or_those_that_are_named(run):
    for step in (5, 10, 100):
        checkpoint(run, step)
    assert steps(folders_of(options(run))) == [100]
    assert steps(folders_of(options(run, "--steps", "all"))) == [5, 10, 100]
    assert steps(folders_of(options(run, "--steps", "100,5"))) == [5, 100]
    with pytest.raises(ValueError, match=r"5, 10, 100; expected \[7\]"):
        list(folders_of(options(run, "--steps", "7,5")))


def test_a_name_of_the_hub_is_taken_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--org--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    shutil.copytree("data_prep/base_model", snapshot)
    asked = options(tmp_path / "run")
    asked.model = "org/small"
    assert (
        list(folders_of(asked)) == [snapshot]
        and str(relative_results_path(snapshot, "org/small")) == "org--small"
    )
    asked.model = "org/unknown"
    with pytest.raises(ValueError, match="--model=org/unknown is not in the hub's cache, and .*HUB_OFFLINE"):
        list(folders_of(asked))


def test_watching_takes_each_as_it_comes_passes_over_those_that_are_gone_and_ends_with_the_run(
    run, monkeypatch
):
    monkeypatch.setattr(program, "WATCH_SECONDS", 0.01)
    checkpoint(run, 1), checkpoint(run, 2)
    with (run / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it runs
        coming = folders_of(options(run, "--watch"))
        assert steps([next(coming)]) == [1]
        shutil.rmtree(run / "global_step_2")
        later = threading.Timer(0.1, lambda: checkpoint(run, 3))
        later.start()
        assert steps([next(coming)]) == [3]
        later.join()
        checkpoint(run, 4)
    assert steps(coming) == [4]  # and stopped, without a summary
