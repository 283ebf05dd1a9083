"""scripts/check_retriever_outage.py: what it takes for a trained error, and the check itself, small."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1.llm_agent.actions import format_observation

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "check_retriever_outage", ROOT / "scripts" / "check_retriever_outage.py"
)
assert spec is not None and spec.loader is not None
check_retriever_outage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_retriever_outage)

DOCUMENT = {"contents": '"Orlen"\nOrlen is a town on the Vey.'}


@pytest.fixture(scope="module")
def url(serve_documents):
    with serve_documents([DOCUMENT, {"contents": '"Vey"\nThe Vey is a river.'}], topk=1) as address:
        yield f"{address}/retrieve"


def make_run(folder: Path, told: str, finish_reason: str = "answer") -> check_retriever_outage.Run:
    run = check_retriever_outage.Run(folder, "run", "http://127.0.0.1:1", folder, [])
    (run.folder / "trajectories").mkdir(parents=True)
    turn = {"action": "search", "query": "Orlen", "obs_start": 1, "obs_end": 3}
    record = {
        "split": "train",
        "uid": "step1-0",
        "trajectory": {"finish_reason": finish_reason, "turns": [turn]},
        "tokens": ["<search> Orlen </search>", told[:7], told[7:], "<answer> a town </answer>"],
    }
    (run.folder / "trajectories" / "step_1.jsonl").write_text(json.dumps(record) + "\n")
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "env/search_failed": 2.0}\n')
    return run


class Told:
    def __init__(self, url: str) -> None:
        self.url = url


def test_observations_that_the_server_gives_are_right_also_when_they_were_cut(tmp_path, url):
    whole, check = format_observation([DOCUMENT]), check_retriever_outage.check_trajectories
    cut = whole[:30] + whole[-len(check_retriever_outage.INFORMATION_END) :]
    assert check(make_run(tmp_path / "whole", whole), Told(url), topk=1) == 2
    assert check(make_run(tmp_path / "cut", cut), Told(url), topk=1, max_obs_length=2) == 2


@pytest.mark.parametrize(
    "told, finish_reason",
    [
        ("\n\n<information>no answer within 60 s</information>\n\n", "answer"),
        (format_observation([]), "answer"),
        (format_observation([{"contents": '"Vey"\nThe Vey is a river.'}]), "answer"),
        (format_observation([DOCUMENT]), "search_failed"),
    ],
)
def test_any_other_observation_is_found(tmp_path, url, told, finish_reason):
    run = make_run(tmp_path, told, finish_reason)
    with pytest.raises(SystemExit, match="FAILED: step_1.jsonl: step1-0"):
        check_retriever_outage.check_trajectories(run, Told(url), topk=1)


@pytest.mark.slow
@pytest.mark.alone
def test_rule_9_a_run_outlives_a_short_outage_and_resumes_after_a_long_one():
    small = {
        "data.val_data_num": 8,
        "data.extra_val_files": "null",
        "data.train_batch_size": 4,
        "actor_rollout_ref.rollout.n_agent": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 16,
    }
    command = [sys.executable, "scripts/check_retriever_outage.py", "--seconds", "3", "--deadline", "5"]
    command += ["--steps", "4", "--kill-step", "2", *(f"{key}={value}" for key, value in small.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "short: its numbers are those of",
        "long: one line, no traceback",
        "long: 4 steps, each once",
    ):
        assert f"ok: {line}" in done.stdout
