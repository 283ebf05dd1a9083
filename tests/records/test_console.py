"""What a run says while it goes."""

import io

from rich.console import Console

from verl.records.console import LiveDisplay, make_display, step_values, validation_lines

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
    }
    extra = {"em": 0.1, "em_by_hops": {"3": 0.1}, "searches": 3.0, "searches_by_hops": {"3": 3.0}}
    metrics = {"val/test_score/nq": 0.25, "val/test_score/popqa": 0.75, "val/greedy/em": 0.5}
    assert validation_lines({"greedy": figures, "extra": {"greedy": extra}}, metrics) == [
        "greedy EM 0.500 (1 hop 0.750, 2 hops 0.250), searches 1.50 (1 hop 1.00, 2 hops 2.00)",
        "extra questions, greedy EM 0.100, searches 3.00",
        "score by data source: nq 0.250, popqa 0.750",
    ]
    of_searches = validation_lines({"greedy": figures}, {"val/test_score/nq": 0.5})
    of_another = validation_lines({"greedy": figures}, {"val/test_score/maze.Maze": 0.625})
    assert of_another == [*of_searches, "score by data source: maze.Maze 0.625"]


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
