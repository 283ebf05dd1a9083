import argparse
import json

import pytest

from scripts.bench.grpo_step_task import GrpoTask, Row, Steps, exact_match, last_answer
from scripts.bench_grpo_step import cpu_seconds_per_step, table
from scripts.compare_algorithms import ALGORITHMS, Result, added
from scripts.compare_algorithms import table as algorithms_table
from verl.trainer.config.loading import load_config
from verl.utils.reward_score import qa_em


@pytest.mark.parametrize(
    ("answer", "golden"),
    [("The  Red Hotel.", ["red hotel"]), ("red", ["blue", "Red!"]), ("red", ["blue"]), (None, ["red"])],
)
def test_the_benchmarks_exact_match_is_the_frameworks(answer, golden):
    assert exact_match(answer, golden) == (answer is not None and qa_em.em_check(answer, golden))


def test_the_last_answer_counts():
    assert last_answer("<answer> a </answer> x <answer>b\nc</answer>") == "b\nc"
    assert last_answer("<answer> a") is None


def make_task(folder, **changes):
    fields = {"model": "m", "url": "u", "folder": "f", "rows": [Row("q", ["a"])], "final_model": "x"}
    fields |= {"records": str(folder / "steps.jsonl"), "num_steps": 2, "max_seconds": 1e9, "seed": 0}
    return GrpoTask(**(fields | changes))


def test_steps_are_written_as_they_end_and_the_run_is_over_after_the_last_or_in_time(tmp_path):
    task = make_task(tmp_path)
    steps = Steps(task)
    steps.add(0.5, 10.0, 100.0)
    assert not steps.is_over
    steps.add(0.75, 10.0, 100.0)
    assert steps.is_over
    written = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["em"] for step in written] == [0.5, 0.75]
    assert written[0]["cpu_s"] <= written[1]["cpu_s"]
    assert Steps(make_task(tmp_path, max_seconds=0.0)).is_over


def test_the_first_steps_are_not_counted():
    from scripts.bench.grpo_step_task import Step

    steps = [Step(cpu, cpu, 0.0, 1.0, 2.0) for cpu in (10.0, 12.0, 14.0, 17.0)]
    assert cpu_seconds_per_step(steps, 2) == 2.5
    assert "2.00 x" in table({"ours": [steps], "TRL": [[Step(2 * s.cpu_s, 0, 0, 1, 2) for s in steps]]}, 2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_run_of_the_comparison_is_a_valid_command_line(name):
    load_config(list(ALGORITHMS[name].overrides))


def test_another_algorithm_can_be_added_by_its_overrides():
    name, algorithm = added("mine:a.b=1,c=2")
    assert name == "mine" and algorithm.overrides[-2:] == ("a.b=1", "c=2")
    with pytest.raises(argparse.ArgumentTypeError, match="expected name:key=value"):
        added("mine")
    assert "| mine | 3 | 0.100 | 0.400 | +0.300 |" in algorithms_table(
        {("mine", 3): Result(0.1, 0.4, 0.5, 9)}
    )
