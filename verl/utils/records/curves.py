"""`curves.png`: how a run went, drawn from the lines of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.records.files import last_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours: told apart by everybody
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a8f98"
HOP_COLOURS = (BLUE, ORANGE, GREEN, RED)
SMOOTH_OVER = 9  # most steps in the moving mean; short runs are smoothed less

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


def draw_curves(rows: Rows, path: Path, title: str) -> None:
    """Draw four panels: right answers and reward, searches, entropy, length.

    Args:
        rows: lines of `metrics.jsonl`; a panel shows what they have.
        path: the PNG file to write.
        title: of the whole picture.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 7), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        axes = figure.subplots(2, 2).flatten()
        _draw_answers(axes[0], rows)
        _draw_searches(axes[1], rows)
        _draw_metric(axes[2], rows, "Entropy (nats per token)", {"actor/entropy_loss": (BLUE, "policy")})
        _draw_metric(
            axes[3],
            rows,
            "Length (tokens the policy wrote)",
            {"response_length/mean": (BLUE, "mean"), "response_length/max": (GREY, "longest")},
        )
        for axis in axes:
            axis.set_xlabel("training step")
            axis.margins(x=0.02)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp.png")
        FigureCanvasAgg(figure).print_png(str(aside))
        aside.replace(path)


def _draw_answers(axis: Axes, rows: Rows) -> None:
    axis.set_title("Right answers and reward")
    if last_steps(rows, "critic/score/mean") != last_steps(rows, "train/em"):  # else one line says both
        _line(axis, rows, "critic/score/mean", GREY, "reward, training")
    _line(axis, rows, "train/em", BLUE, "exact match, training")
    _points(axis, rows, "val/sampled/em", ORANGE, "exact match, validation (sampled)", "o")
    _points(axis, rows, "val/greedy/em", RED, "exact match, validation (greedy)", "s")
    values = [v for name in ("critic/score/mean", "train/em") for _, v in last_steps(rows, name)]
    if not values or (min(values) >= 0 and max(values) <= 1):
        axis.set_ylim(-0.02, 1.02)
    _legend(axis)


def _draw_searches(axis: Axes, rows: Rows) -> None:
    axis.set_title("Searches per question")
    _line(axis, rows, "train/searches", GREY, "training")
    prefix = next(
        (p for p in ("val/sampled/searches", "val/greedy/searches") if last_steps(rows, p)),
        "val/sampled/searches",
    )
    names = sorted({name for row in rows for name in row if name.startswith(f"{prefix}/hops_")})
    for i, name in enumerate(names):
        hops = name.rsplit("_", 1)[-1]
        label = f"validation, {hops} hop{'s' * (hops != '1')}"
        _points(axis, rows, name, HOP_COLOURS[i % len(HOP_COLOURS)], label, "o")
    if not names:
        _points(axis, rows, prefix, ORANGE, "validation", "o")
    axis.set_ylim(bottom=0)
    _legend(axis)


def _draw_metric(axis: Axes, rows: Rows, title: str, names: Mapping[str, tuple[str, str]]) -> None:
    axis.set_title(title)
    for name, (colour, label) in names.items():
        _line(axis, rows, name, colour, label)
    axis.set_ylim(bottom=0)
    if len(names) > 1:
        _legend(axis)


def _line(axis: Axes, rows: Rows, name: str, colour: str, label: str) -> None:
    """The moving mean as a line, with each step's value pale behind it."""
    points = last_steps(rows, name)
    if not points:
        return
    steps, values = np.array([s for s, _ in points]), np.array([v for _, v in points], dtype=float)
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    smooth = moving_mean(values, min(SMOOTH_OVER, 1 + len(values) // 10))
    axis.plot(steps, smooth, color=colour, linewidth=2, label=label)


def _points(axis: Axes, rows: Rows, name: str, colour: str, label: str, marker: str) -> None:
    points = last_steps(rows, name)
    if points:
        axis.plot(
            *zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.6, label=label
        )


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over the `width` values around each one, fewer at the ends; same length."""
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
