"""The output of a run in progress: a live display on a terminal, plain lines elsewhere (`trainer.progress`).

step 12/130  reward 0.41  EM 0.40  searches 1.32  2,345 tokens/s  4:05 left
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from verl.utils.text import printable

EXACT_MATCH = "exact match"
REWARD = "reward"  # an environment's, a verifier's or a user's
Measures = Mapping[str, Mapping[str, Any]]  # environment or data source -> {measure, value, count}
_PACE_OVER = 20  # the time left is estimated from the mean duration of so many steps


def make_display(progress: str, total_steps: int, shown: bool = True) -> Display:
    """Return the display for `trainer.progress`: live | plain | auto (live if standard output is a terminal).

    `shown` is False if "console" is not among the loggers. Only messages are printed then.
    """
    live = progress == "live" or (progress == "auto" and sys.stdout.isatty())
    return LiveDisplay(total_steps) if shown and live else Display(total_steps, shown)


class Display:
    """A display for logs and pipes: one line for each step (if `shown`), and messages."""

    def __init__(self, total_steps: int, shown: bool = True) -> None:
        self.total_steps = total_steps
        self.shown = shown
        self.durations: deque[float] = deque(maxlen=_PACE_OVER)

    def say(self, text: str) -> None:
        """Print one line that stays. What a terminal would take as a command is escaped."""
        print(printable(text), flush=True)

    def close(self) -> None:
        """Close the display; it is safe to call this twice."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done."""
        values = step_values(metrics)
        texts = [f"{value} {name}" if "/" in name else f"{name} {value}" for name, value in values]
        line = "  ".join([f"step {step}/{self.total_steps}", *texts, f"{self.time_left(step, metrics)} left"])
        if self.shown:
            print(line, flush=True)

    def time_left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Estimate the time left after `step` from the last steps' durations, as h:mm:ss or m:ss."""
        self.durations.append(metrics.get("timing_s/step", 0.0))
        seconds = round(sum(self.durations) / len(self.durations) * (self.total_steps - step))
        return str(timedelta(seconds=seconds)).removeprefix("0:").removeprefix("0")


class LiveDisplay(Display):
    """A bar with the last step's values at the foot of the terminal; messages scroll above it."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        super().__init__(total_steps)
        self.bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left"),
            console=console or Console(),
            expand=True,
        )
        self.task: TaskID = self.bar.add_task("run", total=total_steps, left="--:--")
        self.live = Live(self._table({}), console=self.bar.console, refresh_per_second=4)
        self.live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.bar.update(self.task, completed=step, left=self.time_left(step, metrics))
        self.live.update(self._table(metrics))

    def say(self, text: str) -> None:
        self.live.console.print(printable(text), highlight=True, markup=False)

    def close(self) -> None:
        self.live.stop()

    def _table(self, metrics: Mapping[str, float]) -> Table:
        grid = Table.grid(expand=True)
        values = Table.grid(padding=(0, 3))
        cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in step_values(metrics)]
        if cells:
            values.add_row(*cells)
            grid.add_row(values)
        grid.add_row(self.bar)
        return grid


def step_values(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the (name, value) pairs that a line shows.

    A batch without searches shows neither EM nor searches.
    """
    environments = {
        name.split("/")[1] for name in metrics if name.startswith("env/") and name.endswith("/turns")
    }
    hidden = ("EM", "searches") if environments and "search" not in environments else ()
    columns = (
        ("loss", "train/loss", ".4f"),
        ("reward", "critic/score/mean", ".3f"),
        ("EM", "train/em", ".3f"),
        ("searches", "train/searches", ".2f"),
        ("tokens/s", "perf/generated_tokens_per_second", ",.0f"),
        ("tokens/s", "perf/tokens_per_second", ",.0f"),
    )
    return [
        (name, format(metrics[key], form))
        for name, key, form in columns
        if key in metrics and name not in hidden
    ]


def _joined(measures: Measures | None) -> dict[str, float]:
    """Return one value for all that is judged by exact match, and one for each reward, by name."""
    values: dict[str, float] = {}
    matched = [entry for entry in (measures or {}).values() if entry["measure"] == EXACT_MATCH]
    if matched:
        count = sum(entry["count"] for entry in matched)
        values[EXACT_MATCH] = sum(entry["value"] * entry["count"] for entry in matched) / count
    for name, entry in (measures or {}).items():
        if entry["measure"] == REWARD:
            values[f"reward of {name}"] = entry["value"]
    return values


def measures_line(summary: Mapping[str, Any]) -> str:
    """Return how well a run did before and after training, by what its questions are judged by.

    That is the exact match, or the reward where an environment, a verifier or a user's function gives it.
    `summary` is that of `run_summary` of the trainer.
    """
    before = _joined(summary.get("measures_before"))
    after = _joined(summary.get("measures_after"))
    if not before and not after:  # no validation, or one of an earlier version
        for values, em in ((before, summary["em_before"]), (after, summary["em_after"])):
            if em is not None:
                values[EXACT_MATCH] = em
    parts = []
    for name in dict.fromkeys([*before, *after]) or [EXACT_MATCH]:
        form = ".1%" if name == EXACT_MATCH else ".3f"
        texts = [f"{values[name]:{form}}" if name in values else "not measured" for values in (before, after)]
        parts.append(f"{name} {texts[0]} before, {texts[1]} after training")
    return "; ".join(parts)


def validation_lines(summary: Mapping[str, Any], metrics: Mapping[str, float]) -> list[str]:
    """Return the lines that report a validation.

    There is a line for each mode of a `ValidationReport` and one for the extra questions. There is one more
    for the scores of several sources, if they differ.
    """
    lines = [_mode_line(mode, figures) for mode, figures in summary.items() if mode != "extra"]
    lines += [f"extra questions, {_mode_line(*item)}" for item in summary.get("extra", {}).items()]
    head = "val/test_score/"
    scores = {name.removeprefix(head): value for name, value in metrics.items() if name.startswith(head)}
    score_texts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
    return lines + ([f"score by data source: {score_texts}"] if len(set(scores.values())) > 1 else [])


def outcome_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a run: what it has not learnt, and collapses that it has not left.

    `summary` is what `run_outcome` of the trainer returns, and the exact match before and after training.
    """
    lines = []
    kinds = [f"{line['kind']} {line['em']:.3f} ({line['reason']})" for line in summary["not_learnt"]]
    if kinds:
        lines.append(f"not learnt: {'; '.join(kinds)}")
    if summary["score_rose"] is False:
        lines.append("nothing was learnt: beyond chance, the answers are no better than before training")
    for collapse in summary["open_collapses"]:
        lines.append(f"the run ends in a collapse that it has not left: {collapse['line']}")
    return lines


def _mode_line(mode: str, figures: Mapping[str, Any]) -> str:
    def by_hops(values: Mapping[str, float], form: str) -> str:
        texts = [f"{hops} hop{'s' * (hops != '1')} {value:{form}}" for hops, value in values.items()]
        return f" ({', '.join(texts)})" if len(texts) > 1 else ""

    num_unverified = figures.get("num_unverified", 0)
    failures = ""
    if num_unverified:
        failures = f"; {num_unverified} of {figures['num_questions']} questions failed and are left out"
    if figures["em"] is None:
        return f"{mode}: no question could be judged{failures}"
    values = _joined(figures["measures"])
    parts = []
    for name, value in values.items():
        if name == EXACT_MATCH:
            parts.append(f"EM {value:.3f}{by_hops(figures['em_by_hops'], '.3f')}")
        else:
            parts.append(f"{name} {value:.3f}")
    if EXACT_MATCH in values or figures["searches"] > 0:
        parts.append(f"searches {figures['searches']:.2f}{by_hops(figures['searches_by_hops'], '.2f')}")
    return f"{mode} {', '.join(parts)}{failures}"
