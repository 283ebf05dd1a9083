"""scripts/bench_search_rollout.py: what it counts, what it prints, and that contenders do the same work."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.search_rollout_lockstep import LockStep
from scripts.bench.search_rollout_task import Counts, Measured, Task, measure
from scripts.bench_search_rollout import LOCK_STEP, OURS, TRL, Run, command_of, notes, questions, table

ROOT = Path(__file__).parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"


def make_run(cpu_s: float, searches: int = 12) -> Run:
    return Run(Measured(8, cpu_s, 2 * cpu_s, Counts(searches, 80, 160, 6)), 0.1)


def test_the_table_has_medians_and_ratios_of_medians():
    runs = {
        (50.0, OURS): [make_run(1.0), make_run(4.0), make_run(2.0)],
        (50.0, TRL): [make_run(8.0), make_run(8.0), make_run(80.0)],
    }
    ours, trl = table(runs).splitlines()[2:]
    assert (
        ours
        == "| 50 ms | ours | 4.0 (2.0 to 8.0) | 1.00 x | 2.00 | 4.00 | 0.10 | 1.50 | 20.0 (10.0) | 0.75 |"
    )
    assert trl.startswith("| 50 ms | TRL | 1.0 (0.1 to 1.0) | 4.00 x | 8.00 | 16.00 |")


def test_below_the_table_stands_where_contenders_do_not_do_the_same():
    lines = notes([OURS, TRL]).splitlines()
    assert [line.split(":")[0] for line in lines] == [OURS, TRL]
    assert "goes on" in lines[0] and "ends the trajectory" in lines[1]


def test_the_warm_up_is_not_measured(capsys, tmp_path):
    task = Task("model", "url", ["w"], ["a", "b"], seed=3)
    path = tmp_path / "task.json"
    path.write_text(json.dumps(dataclasses.asdict(task)))
    assert Task.read(str(path)) == task
    asked = []

    def run(prompts: list[str], seed: int) -> Counts:
        asked.append((prompts, seed))
        return Counts(len(prompts), 0, 0, 0)

    measure(task, run)
    assert asked == [(["w"], 4), (["a", "b"], 3)]
    measured = Measured.parse(capsys.readouterr().out)
    assert (measured.trajectories, measured.counts.searches) == (2, 2)


def test_the_prompts_are_different_questions_and_always_the_same():
    assert len(set(questions(20))) == 20 and questions(20) == questions(20)


@pytest.mark.parametrize(
    "said, kept",
    [
        ("<search> a</search> and more", "<search> a</search>"),
        ("<answer> a</answer> and more", "<answer> a</answer>"),
        ("words", "words"),
    ],
)
def test_the_lock_step_loop_cuts_behind_the_first_closing_tag(said, kept):
    assert LockStep._cut(said) == kept


@pytest.mark.slow
def test_contenders_do_about_the_same_work(serve_documents, tmp_path):
    from data_prep.microworld import write_world

    write_world(999, tmp_path, num_train=2, num_test=2, num_3hop=2)
    documents = [json.loads(line) for line in (tmp_path / "corpus.jsonl").open(encoding="utf-8")]
    prompts = [prompt for prompt in questions(8) for _ in range(8)]
    with serve_documents(documents, topk=2) as address:
        task = Task(str(BASE_MODEL), f"{address}/retrieve", prompts[:4], prompts, seed=1)
        path = tmp_path / "task.json"
        path.write_text(json.dumps(dataclasses.asdict(task)))
        measured = {}
        for contender in (OURS, LOCK_STEP):
            done = subprocess.run(
                [*command_of(contender, None), str(path)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            measured[contender] = Measured.parse(done.stdout.splitlines()[-1])
    assert command_of(OURS, None)[0] == sys.executable
    for name in ("searches", "answers"):
        ours, theirs = (getattr(measured[contender].counts, name) for contender in (OURS, LOCK_STEP))
        assert ours == pytest.approx(theirs, rel=0.4), name
    counts = measured[LOCK_STEP].counts
    assert counts.kept_tokens < counts.sampled_tokens
