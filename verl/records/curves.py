"""The picture `curves.png`: how a run went, drawn from the lines of `metrics.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.json_files import last_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which everybody can tell apart
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
RED = "#d55e00"
GREY = "#8a8f98"
PURPLE = "#cc79a7"
SKY = "#56b4e9"
HOP_COLOURS = (BLUE, ORANGE, GREEN, RED)
ANSWERS = "Right answers and reward"
SEARCHES = "Searches per question"
LINES = {  # lines of training: panel -> metric -> colour, label
    ANSWERS: {
        "critic/score/mean": (GREY, "reward, training"),
        "train/em": (BLUE, "exact match, training"),
    },
    SEARCHES: {"train/searches": (GREY, "training")},
    "Entropy (nats per token)": {"actor/entropy_loss": (BLUE, "policy")},
    "Length (tokens the policy wrote)": {
        "response_length/mean": (BLUE, "mean"),
        "response_length/max": (GREY, "longest"),
    },
}
RETRIEVERS = {  # ending of the name of a set of `trainer.evals` -> label, colour, marker
    "/shuffled": ("shuffled passages", GREEN, "^"),
    "/empty": ("no passages", PURPLE, "v"),
    "": ("own passages", SKY, "D"),
}
SMOOTH_OVER = 9  # the moving mean is over at most so many steps; short runs are smoothed less

_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bcc4",
    "axes.grid": True,
    "grid.color": "#e8eaee",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#555b66",
    "xtick.color": "#555b66",
    "ytick.color": "#555b66",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def draw_curves(rows: Rows, path: Path, title: str, branches: Sequence[Rows] = ()) -> None:
    """Draw four panels: right answers and reward, searches, entropy, length.

    The panel of right answers also shows those without the passages that a question needs
    (`controlled_sets`). A run in environments has their rewards in its place, of training and of validation,
    and their turns in place of searches if it does not search.

    Args:
        rows: lines of `metrics.jsonl`; a panel shows what they have.
        path: the PNG file to write.
        title: title of the picture.
        branches: the lines of steps that the run has left by going back (verl/trainer/rewinds.py), drawn in
            grey.
    """
    with _picture(path, title) as axes:
        environments = environments_in(rows)
        panels = panels_of(environments)
        for axis, (name, lines) in zip(axes, panels.items(), strict=True):
            axis.set_title(name)
            for metric, (colour, label) in lines.items():
                _line(axis, last_steps(rows, metric), colour, label)
                for branch in branches:
                    _left_branch(axis, last_steps(branch, metric))
        for mode, colour, marker in (("sampled", ORANGE, "o"), ("greedy", RED, "s")):
            label = f"exact match, validation ({mode})"
            if not environments:
                _points(axes[0], last_steps(rows, f"val/{mode}/em"), colour, label, marker)
        for name, colour in zip(environments, HOP_COLOURS, strict=False):
            _points(axes[0], last_steps(rows, f"val/test_score/{name}"), colour, f"{name}, validation", "o")
        if not environments:
            for metric, (label, colour, marker) in controlled_sets(rows).items():
                _points(axes[0], last_steps(rows, metric), colour, label, marker)
        validated = [m for m in ("sampled", "greedy") if last_steps(rows, f"val/{m}/searches")]
        prefix = f"val/{(validated or ['sampled'])[0]}/searches"
        names = sorted({name for row in rows for name in row if name.startswith(f"{prefix}/hops_")})
        for i, name in enumerate((names or [prefix]) if SEARCHES in panels else []):
            hops = name.rsplit("_", 1)[-1]
            label = f"validation, {hops} hop{'s' * (hops != '1')}" if names else "validation"
            colour = HOP_COLOURS[i % len(HOP_COLOURS)] if names else ORANGE
            _points(axes[1], last_steps(rows, name), colour, label, "o")
        first_panel = next(iter(panels.values()))
        values = [v for name in first_panel for _, v in last_steps(rows, name)]
        for axis in axes:
            axis.set_ylim(bottom=0)
        axes[0].set_ylim(min([-0.02, *values]), max([1.02, *values]))


def environments_in(rows: Rows) -> list[str]:
    """Return the environments that give the rewards of a run, or [] if it only searches."""
    names = {name.split("/")[1] for row in rows for name in row if re.fullmatch("env/[^/]+/reward", name)}
    return sorted(names)


def panels_of(environments: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the panels of a run's picture: panel -> metric -> (colour, label)."""
    if not environments:
        return dict(LINES)
    coloured = list(zip(environments, HOP_COLOURS, strict=False))
    panels: dict[str, dict[str, tuple[str, str]]] = {}
    for panel, lines in LINES.items():
        if panel == ANSWERS:
            rewards = {f"env/{name}/reward": (colour, f"{name}, training") for name, colour in coloured}
            panels["Reward"] = rewards
        elif panel == SEARCHES and "search" not in environments:
            panels["Turns per episode"] = {f"env/{name}/turns": (colour, name) for name, colour in coloured}
        else:
            panels[panel] = lines
    return panels


def controlled_sets(rows: Rows) -> dict[str, tuple[str, str, str]]:
    """Return metric -> (label, colour, marker) of the sets of `trainer.evals` that compare passages.

    These are the sets that find passages of other questions, or none, and the sets of the same names that
    find their own.
    """
    metrics = {name for row in rows for name in row if re.fullmatch("eval/[^/]+(/shuffled|/empty)?/em", name)}
    sets = {metric.split("/")[1] for metric in metrics if metric.count("/") == 3}
    styles = {}
    for name in sorted(sets):
        for ending, (label, colour, marker) in RETRIEVERS.items():
            metric = f"eval/{name}{ending}/em"
            if metric in metrics:
                set_note = f" ({name})" if len(sets) > 1 else ""
                styles[metric] = (f"exact match, {label}{set_note}", colour, marker)
    return styles


def draw_panels(rows: Rows, panels: Mapping[str, Sequence[str]], path: Path, title: str) -> bool:
    """Draw up to four panels, name -> metrics.

    Returns False, and writes nothing, if the rows have none of these metrics.
    """
    if not any(last_steps(rows, metric) for metrics in panels.values() for metric in metrics):
        return False
    with _picture(path, title) as axes:
        for axis, (name, metrics) in zip(axes, panels.items(), strict=False):
            axis.set_title(name)
            for metric, colour in zip(metrics, HOP_COLOURS, strict=False):
                _line(axis, last_steps(rows, metric), colour, metric)
    return True


@contextmanager
def _picture(path: Path, title: str) -> Iterator[list[Axes]]:
    """Open four panels over training steps for drawing, and write the file at the end of the `with` block."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 7), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        axes = list(figure.subplots(2, 2).flatten())
        for axis in axes:
            axis.set_xlabel("training step")
            axis.margins(x=0.02)
        yield axes
        for axis in axes:
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.png")
        FigureCanvasAgg(figure).print_png(str(temporary))
        temporary.replace(path)


def _line(axis: Axes, points: list[tuple[int, float]], colour: str, label: str) -> None:
    """Draw the mean over the values around each step as a line, with each step's value pale behind it."""
    if not points:
        return
    steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    half = min(SMOOTH_OVER, 1 + len(values) // 10) // 2
    smooth = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    axis.plot(steps, smooth, color=colour, linewidth=2, label=label)


def _left_branch(axis: Axes, points: list[tuple[int, float]]) -> None:
    """Draw the values of steps that a run has left."""
    if not points:
        return
    has_label = "left by a rewind" in axis.get_legend_handles_labels()[1]
    label = "_nolegend_" if has_label else "left by a rewind"
    steps, values = zip(*points, strict=True)
    axis.plot(steps, values, color=GREY, linestyle=":", linewidth=1.4, label=label)


def _points(axis: Axes, points: list[tuple[int, float]], colour: str, label: str, marker: str) -> None:
    if points:
        style: Any = {"marker": marker, "markersize": 5, "linewidth": 1.6}
        axis.plot(*zip(*points, strict=True), color=colour, label=label, **style)
