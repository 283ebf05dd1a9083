"""Draw runs that have ended in one picture, a line for each.

    python scripts/plot_runs.py seeds --out docs/seeds.png verl_checkpoints/microworld-seed2?-*
    python scripts/plot_runs.py hops --out docs/hops.png verl_checkpoints/hops-seed0-...
    python scripts/plot_runs.py staleness --out docs/staleness.png verl_checkpoints/stale-*

seeds: right answers and searches over the training steps, and those of the test at the end
hops:  exact match by hops, before and after runs of configs/hops.yaml, and its course over their steps
staleness: the course of runs ahead by k, and exact match at the end by k and correction of the ratio
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import yaml  # noqa: E402

from verl.utils.json_files import last_steps, read_lines  # noqa: E402

SMOOTHED = 9  # a point of a curve is the mean of so many steps


def plot_smoothed(axes: Any, rows: list[dict[str, Any]], key: str, **style: Any) -> list[int]:
    """Plot a figure's running mean over the steps; return the steps that have it."""
    steps, values = zip(*last_steps(rows, key), strict=True)
    means = np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid")
    axes.plot(steps[SMOOTHED // 2 :][: len(means)], means, **style)
    return list(steps)


def draw_seeds(panels: Any, run: Path, summary: dict[str, Any], is_first: bool) -> None:
    """Draw exact match on the left, searches on the right; only one run has labels."""
    rows = read_lines(run / "metrics.jsonl")
    by_panel = summary["em_after_by_hops"], summary["searches_by_hops"]
    for axes, key, by_hops in zip(panels, ("train/em", "train/searches"), by_panel, strict=True):
        steps = plot_smoothed(axes, rows, key, color="tab:blue", alpha=0.5)
        for (hops, value), colour in zip(by_hops.items(), ("tab:green", "tab:orange"), strict=False):
            name = f"test, {hops} hop{'s' * (hops != '1')}" if is_first else None
            axes.plot(steps[-1] + 4, value, "o", color=colour, alpha=0.6, label=name)
    panels[0].set(xlabel="step", ylabel="exact match, sampled", ylim=(0, 1.02))
    panels[1].set(xlabel="step", ylabel="searches", ylim=(0.9, 2.3))


def draw_hops(panels: Any, run: Path, summary: dict[str, Any], is_first: bool) -> None:
    """Draw exact match before and after by hops on the left, the course of 1 to 3 hops on the right."""
    rows = read_lines(run / "metrics.jsonl")
    for when, trained, colour in (("before", "1 and 2", "tab:gray"), ("after", "1 to 3", "tab:blue")):
        by_hops = summary[f"em_{when}_by_hops"] | summary[f"extra_em_{when}_by_hops"]
        name = f"after training on {trained} hops" if is_first else None
        panels[0].plot(list(by_hops), list(by_hops.values()), "o-", color=colour, alpha=0.6, label=name)
    for hops, colour in (("1", "tab:green"), ("2", "tab:orange"), ("3", "tab:red")):
        points = last_steps(rows, f"val/sampled/em/hops_{hops}")
        name = f"{hops} hop{'s' * (hops != '1')}" if is_first else None
        panels[1].plot(*zip(*points, strict=True), "o-", color=colour, alpha=0.6, label=name)
    panels[0].set(xlabel="hops of the question", ylabel="exact match, sampled", ylim=(0, 1.02))
    panels[1].set(xlabel="step")


def draw_staleness(panels: Any, run: Path, summary: dict[str, Any], is_first: bool) -> None:
    """Draw the course on the left, for runs with the clipped ratio, and the end of all runs on the right."""
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    k = settings["trainer"]["async_training"]["max_staleness"]
    loss = settings["actor_rollout_ref"]["actor"]
    is_weighted = settings["algorithm"]["rollout_correction"]["rollout_is"] is not None
    if is_weighted:
        kind = "weighted"
    else:
        kind = "clipped" if loss["policy_loss"]["loss_mode"] == "vanilla" else "none"
    if kind == "clipped":
        rows = read_lines(run / "metrics.jsonl")
        plot_smoothed(panels[0], rows, "train/em", label=f"k = {k}", alpha=0.8)
    style = {"clipped": ("o", "tab:blue"), "weighted": ("s", "tab:orange"), "none": ("x", "tab:red")}[kind]
    drawn_names = panels[1].get_legend_handles_labels()[1]
    name = {"clipped": "clipped ratio", "weighted": "weighted", "none": "no correction"}[kind]
    panels[1].plot(
        k, summary["em_after"], style[0], color=style[1], label=None if name in drawn_names else name
    )
    panels[0].set(xlabel="step", ylabel="exact match, sampled", ylim=(0, 1.02))
    panels[1].set(xlabel="k", ylabel="exact match at the end, sampled", ylim=(0, 1.02))


PICTURES = {
    "seeds": (draw_seeds, "lower right", "upper left"),
    "hops": (draw_hops, "center left", "lower right"),
    "staleness": (draw_staleness, "lower right", "lower left"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that have ended")
    parser.add_argument("--out", type=Path, required=True, help="the picture's file")
    options = parser.parse_args()
    draw, *legend_places = PICTURES[options.picture]
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=draw is draw_hops)
    for run in options.runs:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        draw(panels, run, summary, is_first=run == options.runs[0])
    for axes, legend_place in zip(panels, legend_places, strict=True):
        axes.legend(frameon=False, loc=legend_place)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
