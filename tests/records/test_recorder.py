"""A run's records: what the files hold, also after a kill and a restart."""

import json
import re
from pathlib import Path

from records_data import SplitTokenizer, report, step_batch

from verl.checkpoints.run_state import RunState
from verl.records import RunRecorder
from verl.records.recorder import run_title
from verl.records.trajectories import TokenTexts, trajectory_records
from verl.trainer.config import load_config
from verl.trainer.ppo.validation import run_summary
from verl.utils.json_files import MetricsFile, read_lines, to_json

TEXTS = TokenTexts(SplitTokenizer())


def make_config(tmp_path: Path, *overrides: str):
    return load_config(
        [f"trainer.default_local_dir={tmp_path}/run", "trainer.progress=plain", "trainer.seed=3", *overrides]
    )


def run(
    config, total: int, state: RunState, resumed_from: Path | None, until: int | None = None
) -> RunRecorder:
    """Steps of a pretended run: what the trainer does with its recorder."""

    def records(batch, split: str) -> list[dict]:
        return trajectory_records(batch, TEXTS, state.step, split, config.trainer.num_trajectories_logged)

    recorder = RunRecorder(config, total)
    recorder.start(state.step, resumed_from)
    if state.step == 0:
        first = report(0.2, step_batch(["Ada", "Bob"]))
        state.validation["before"] = first.summary()
        told = records(first.samples, "val")
        recorder.log_validation(0, first.metrics(), first.summary(), told, first.lines())
    while state.step < (until or total):
        state.step += 1
        metrics = {
            "critic/score/mean": 0.1 * state.step,
            "train/em": 0.75,
            "train/searches": 1.0,
            "timing_s/step": 2.0,
            "perf/generated_tokens": 100,
            "perf/trained_tokens": 300,
            "perf/generated_tokens_per_second": 1234.5,
        }
        state.add_step(metrics, {"gen": 1.0, "update_actor": 0.5}, wall_seconds=2.0 * state.step)
        if state.step == total:
            last = report(0.8)
            state.validation["after"] = last.summary()
            recorder.log_validation(total, last.metrics(), last.summary(), [], last.lines())
            metrics |= last.metrics()
        batch = step_batch(["Ada", "Bob", "Ada", "Ada"])
        recorder.log_step(state.step, metrics, records(batch, "train"))
    return recorder


def test_a_run_leaves_its_records(tmp_path, capsys):
    config = make_config(tmp_path, "trainer.num_trajectories_logged=3")
    state = RunState()
    recorder = run(config, 3, state, None)
    summary = recorder.finish(run_summary(state, 7.0, seed=3))
    recorder.close()
    folder = tmp_path / "run"
    lines = MetricsFile(folder / "metrics.jsonl").read()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["val/greedy/em"] == 0.2 and lines[3]["val/greedy/em"] == 0.8
    assert lines[1]["train/em"] == 0.75
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "trajectories").iterdir()) == [
        f"step_{i}.jsonl" for i in range(4)
    ]
    asked = read_lines(folder / "validation.jsonl")
    assert [sum(line["em"] for line in asked if line["step"] == step) for step in (0, 3)] == [8.0, 26.0]
    records = read_lines(folder / "trajectories" / "step_1.jsonl")
    assert len(records) == 3 and records[0]["split"] == "train"
    page = (folder / "trajectories.html").read_text()
    assert "Who made the cheese?" in page
    assert re.findall(r'"step": (\d+), "split"', page)[0] == "3", "it opens at the newest step"
    said = capsys.readouterr().out
    assert "step 2/3  reward 0.200  EM 0.750  searches 1.00  1,234 tokens/s  0:02 left" in said
    assert "validation at step 0" in said and "done after 3 steps" in said


def test_the_summary_has_the_sampled_figures_first_and_all_that_is_promised(tmp_path):
    state = RunState()
    recorder = run(make_config(tmp_path), 2, state, None)
    summary = recorder.finish(run_summary(state, 5.0, seed=3))
    recorder.close()
    assert summary["em_before"] == 0.4 and summary["em_before_greedy"] == 0.2
    assert summary["em_after"] == 1.0 and summary["em_after_greedy"] == 0.8
    assert summary["em_after_by_hops"] == {"1": 1.0, "2": 1.0}
    assert summary["searches_by_hops"] == {"1": 1.0, "2": 2.0}
    assert summary["num_val_questions"] == 10 and summary["num_val_questions_greedy"] == 20
    assert summary["steps"] == 2 and summary["wall_seconds"] == 5.0 and summary["seed"] == 3
    assert summary["seconds_by_phase"] == {"gen": 2.0, "update_actor": 1.0}
    assert summary["generated_tokens_per_second"] == 100.0
    assert summary["trained_tokens_per_second"] == 600.0


def test_a_run_in_an_environment_ends_with_its_reward_and_is_named_after_it(tmp_path, capsys):
    config = make_config(tmp_path, "environment.env_class=text2sql")
    state = RunState()
    recorder = RunRecorder(config, 1)
    recorder.start(0, None)
    for when, share in (("before", 0.2), ("after", 0.8)):
        told = report(share)
        for row in told.rows["greedy"]:  # the first ten are also those of the other mode
            row |= {"env_class": "text2sql", "judged_by": "score", "em": 0.0, "searches": 0}
        state.validation[when] = told.summary()
    summary = recorder.finish(run_summary(state, 5.0, seed=3))
    recorder.close()
    assert summary["measures_after"]["text2sql"] == {"measure": "reward", "value": 1.0, "count": 10}
    said = capsys.readouterr().out
    assert "done after 0 steps: reward of text2sql 0.400 before, 1.000 after training\n" in said
    assert '"title": "run / text2sql"' in (tmp_path / "run/trajectories.html").read_text()


def test_a_run_with_names_has_them_as_its_title(tmp_path):
    named = make_config(tmp_path, "trainer.project_name=mine", "trainer.experiment_name=first")
    assert run_title(named) == "mine / first"
    assert run_title(make_config(tmp_path)) == "run"


def test_the_last_lines_of_a_run_say_what_was_not_learnt(tmp_path, capsys):
    state = RunState()
    recorder = run(make_config(tmp_path), 2, state, None)
    for figures in state.validation["after"]["sampled"]["kinds"].values():
        figures["count"] = 100
    state.validation["after"]["sampled"]["kinds"]["cheese.hops_2"] |= {"em": 0.0, "searches": 1.0}
    summary = recorder.finish(run_summary(state, 5.0, seed=3))
    recorder.close()
    assert [line["kind"] for line in summary["not_learnt"]] == ["2 hops"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["not_learnt"] == summary["not_learnt"]
    assert capsys.readouterr().out.splitlines()[-2:] == [  # 0.4 before, 0.5 after, of few questions
        "  not learnt: 2 hops 0.000 (one search for every question)",
        "  nothing was learnt: beyond chance, the answers are no better than before training",
    ]


def test_rule_10_the_records_of_a_killed_and_resumed_run_are_those_of_an_undisturbed_one(tmp_path):
    undisturbed = make_config(tmp_path / "a")
    run(undisturbed, 6, RunState(), None).close()
    killed = make_config(tmp_path / "b")
    run(killed, 6, RunState(), None, until=5).close()
    with (tmp_path / "b/run/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "critic/sc')  # killed while it wrote
    checkpoint = RunState(step=2)
    run(killed, 6, checkpoint, tmp_path / "b/run/global_step_2").close()
    for name in ("metrics.jsonl", *(f"trajectories/step_{i}.jsonl" for i in range(7))):
        assert (tmp_path / "a/run" / name).read_text() == (tmp_path / "b/run" / name).read_text(), name


def test_a_run_that_starts_anew_keeps_nothing_of_an_earlier_one(tmp_path):
    config = make_config(tmp_path)
    run(config, 4, RunState(), None).close()
    run(config, 2, RunState(), None).close()
    assert [line["step"] for line in MetricsFile(tmp_path / "run/metrics.jsonl").read()] == [0, 1, 2]
    assert not (tmp_path / "run/trajectories/step_3.jsonl").exists()


def test_json_has_no_nan_and_keeps_numbers_exactly():
    text = to_json({"a": float("nan"), "b": 0.1 + 0.2, "c": float("-inf"), "d": True, "e": "ä"})
    assert text == '{"a": null, "b": 0.30000000000000004, "c": null, "d": true, "e": "ä"}'
