"""What a run says while it goes."""

import io

from rich.console import Console

from verl.records.console import (
    LiveDisplay,
    make_display,
    measures_line,
    step_values,
    validation_lines,
)

NQ = {"measure": "exact match", "value": 0.25, "count": 10}
POPQA = {"measure": "exact match", "value": 0.75, "count": 10}
SQL = {"measure": "reward", "value": 0.071, "count": 20}
METRICS = {
    "critic/score/mean": 0.4125,
    "train/em": 0.4,
    "train/searches": 1.32,
    "perf/generated_tokens_per_second": 2345.6,
    "timing_s/step": 30.0,
}


def test_a_validation_is_a_line_for_each_mode_and_for_several_sources():
    figures = {
        "em": 0.5,
        "em_by_hops": {"1": 0.75, "2": 0.25},
        "searches": 1.5,
        "searches_by_hops": {"1": 1.0, "2": 2.0},
        "measures": {"nq": NQ, "popqa": POPQA},
    }
    extra = {"em": 0.1, "em_by_hops": {"3": 0.1}, "searches": 3.0, "searches_by_hops": {"3": 3.0}}
    extra["measures"] = {"far": NQ | {"value": 0.1}}
    metrics = {"val/test_score/nq": 0.25, "val/test_score/popqa": 0.75, "val/greedy/em": 0.5}
    assert validation_lines({"greedy": figures, "extra": {"greedy": extra}}, metrics) == [
        "greedy EM 0.500 (1 hop 0.750, 2 hops 0.250), searches 1.50 (1 hop 1.00, 2 hops 2.00)",
        "extra questions, greedy EM 0.100, searches 3.00",
        "score by data source: nq 0.250, popqa 0.750",
    ]


def test_an_environment_is_told_by_its_reward_and_not_by_an_exact_match():
    figures = {
        "em": 0.0,
        "em_by_hops": {},
        "searches": 0.0,
        "searches_by_hops": {},
        "measures": {"text2sql": SQL},
    }
    scores = {"val/test_score/text2sql": 0.071, "val/test_score/bird": 0.071}
    assert validation_lines({"sampled": figures}, scores) == ["sampled reward of text2sql 0.071"]
    figures |= {"measures": {"nq": NQ, "popqa": POPQA, "text2sql": SQL}, "searches": 0.5}
    assert validation_lines({"sampled": figures}, {}) == [
        "sampled EM 0.500, reward of text2sql 0.071, searches 0.50"
    ]


def test_the_last_line_has_the_measure_of_what_was_asked():
    learnt = SQL | {"value": 0.983}
    summary = {"measures_before": {"text2sql": SQL}, "measures_after": {"text2sql": learnt}}
    assert measures_line(summary) == "reward of text2sql 0.071 before, 0.983 after training"
    summary = {"measures_before": None, "measures_after": {"nq": NQ, "popqa": POPQA, "text2sql": learnt}}
    assert measures_line(summary) == (
        "exact match not measured before, 50.0% after training; "
        "reward of text2sql not measured before, 0.983 after training"
    )
    nothing = {"measures_before": None, "measures_after": None, "em_before": None, "em_after": None}
    assert measures_line(nothing) == "exact match not measured before, not measured after training"
    earlier_version = nothing | {"em_before": 0.0, "em_after": 0.5}
    assert measures_line(earlier_version) == "exact match 0.0% before, 50.0% after training"


def test_a_batch_without_searches_shows_no_searches():
    names = [name for name, _ in step_values(METRICS | {"env/maze.Maze/turns": 2.0})]
    assert names == ["reward", "tokens/s"]
    both = METRICS | {"env/maze.Maze/turns": 2.0, "env/search/turns": 2.0}
    assert step_values(both) == step_values(METRICS)


def test_the_live_display_shows_the_figures_and_ends_cleanly():
    out = io.StringIO()
    display = LiveDisplay(12, Console(file=out, force_terminal=True, width=100))
    try:
        display.step(3, METRICS)
        display.say("validation at step 3: [em] 0.5")
    finally:
        display.close()
        display.close()
    text = out.getvalue()
    assert "[dim]" not in text and "[bold]" not in text
    for part in ("reward", "0.412", "2,346", "3/12", "4:30 left", "validation at step 3: [em]"):
        assert part in text.replace("\x1b[1m", "").replace("\x1b[0m", "") or part in strip(text), part


def strip(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_pipe_gets_lines_and_a_silent_run_messages(capsys):
    for progress in ("auto", "plain"):  # captured output is no terminal
        make_display(progress, 3).step(1, METRICS)
        assert capsys.readouterr().out.startswith("step 1/3  reward 0.41")
    silent = make_display("live", 3, shown=False)
    silent.step(1, METRICS)
    silent.say("hello \x1b[2J")
    assert capsys.readouterr().out == "hello \\x1b[2J\n"
