"""The evaluation reports mistakes before it loads torch, and its first line shows the settings."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.evaluation import program
from verl.evaluation.program import build_parser, read_options, settings_of
from verl.utils.model_folders import LOCAL_SEARCH

ROOT = Path(__file__).parents[2]
ENDED = "http://127.0.0.1:40123/retrieve"  # the server that a training started for itself
ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Who?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["me"]}},
}
WITHOUT_TORCH = """
import sys
from verl.evaluation.program import main
status = main(sys.argv[1:])
assert not {"torch", "transformers"} & sys.modules.keys(), "loaded"
sys.exit(status)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("RETRIEVER_URL", raising=False)
    folder = tmp_path / "run"
    model = folder / "global_step_5" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    settings = {"max_turns": 1, "retriever": {"url": ENDED, "topk": 2}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return folder


def arguments(run, *more):
    rows = run.parent / "rows.jsonl"
    return ["--model", str(run), "--benchmarks", str(rows), "--out", str(run.parent / "evals"), *more]


def address(run, capsys, *more):
    """Return the address of the search server that an evaluation of a run asks, and what it prints."""
    parser = build_parser("evaluate", None, "evals")
    options = read_options(parser, arguments(run, *more))
    config = settings_of(run / "global_step_5" / "actor" / "huggingface", options)
    return config.retriever.url, capsys.readouterr().err


def test_the_search_server_is_that_of_infer_and_not_of_a_training_that_is_over(run, capsys, monkeypatch):
    url, line = address(run, capsys)
    assert url == LOCAL_SEARCH and f"searches at {LOCAL_SEARCH} (that of bash retrieval_launch.sh" in line
    assert "asks with max_turns=1 do_search=True retriever.topk=2 " in line
    assert f"(from {run}/config.yaml, and the command line)" in line
    with (run / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it trains
        assert address(run, capsys)[0] == ENDED
    monkeypatch.setenv("RETRIEVER_URL", "http://other:1/retrieve")
    url, line = address(run, capsys)
    assert url == "http://other:1/retrieve" and "(RETRIEVER_URL)" in line
    url, line = address(run, capsys, "retriever.url=http://mine:2/retrieve")
    assert url == "http://mine:2/retrieve" and "(command line)" in line


def test_without_searches_no_server_is_named(run, capsys):
    assert "searches at" not in address(run, capsys, "do_search=false")[1]


def test_more_rows_than_a_file_has_are_a_mistake_also_where_the_file_is_large(run, monkeypatch):
    monkeypatch.setattr("verl.data.row_check.SMALL_BYTES", 0)
    options = read_options(build_parser("evaluate", None, "evals"), arguments(run, "-n", "9"))
    folder = run / "global_step_5" / "actor" / "huggingface"
    target = program.EvaluationTarget(folder, Path("run"), settings_of(folder, options))
    with pytest.raises(ValueError, match="-n: found 9, .* has 1 rows"):
        program.check_rows(target, options)


def test_mistakes_are_said_without_torch(run):
    """Each mistake is status 2 and one line, although no model could be loaded from the folder."""
    results = run.parent / "evals" / "run" / "global_step_5" / "rows"
    results.mkdir(parents=True)
    (run.parent / "broken.jsonl").write_text(json.dumps({**ROW, "prompt": []}) + "\n")
    (run.parent / "game.jsonl").write_text(json.dumps({**ROW, "env_class": "no_such"}) + "\n")
    url = "retriever.url=http://127.0.0.1:1"
    cases = [
        (["-n", "9"], "-n: found 9"),
        (["max_turn=3"], "max_turns"),
        ([url], "the search server does not answer"),
        (["--benchmarks", str(run.parent / "broken.jsonl")], "column prompt"),
        (["--benchmarks", str(run.parent / "game.jsonl")], "no_such"),
        (["--out", str(run / "metrics.jsonl")], "--out: found"),
        (["--encoder", str(run / "nothing")], "--encoder: found"),
        (["--steps", "5,7"], "expected [7]"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    for more, said in cases:
        ended = subprocess.run(
            [*command, *arguments(run, *more)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert (ended.returncode, said in ended.stderr) == (2, True), (said, ended.stderr)
    (results / "results.jsonl").write_text("")
    ended = subprocess.run(
        [*command, *arguments(run)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "Give --resume" in ended.stderr, ended.stderr
    flags = ["--base_url", "http://127.0.0.1:1/v1", "--model", "some/model", "do_search=false"]
    ended = subprocess.run(
        [*command, *arguments(run)[2:], *flags], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "--base_url: found nothing that answers" in ended.stderr, ended.stderr


def test_all_checkpoints_are_looked_at_before_one_is_measured(run, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(program, "evaluate", lambda target, *_: measured.append(target))
    later = run / "global_step_9" / "actor" / "huggingface"
    later.mkdir(parents=True)
    (later / "config.json").write_text("{}")
    results = run.parent / "evals" / "run" / "global_step_9" / "rows"
    results.mkdir(parents=True)
    flags = arguments(run, "--steps", "all", "do_search=false")
    assert program.main(flags) == 0 and len(measured) == 2
    assert capsys.readouterr().err.count("asks with") == 1
    (results / "results.jsonl").write_text("")
    assert program.main(flags) == 2 and len(measured) == 2
    assert "global_step_9" in capsys.readouterr().err
