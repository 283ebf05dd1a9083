"""Draws the course of several runs in one picture: right answers and searches of their training steps.

python scripts/plot_seeds.py verl_checkpoints/microworld-seed2?-base_model-grpo-* --out docs/seeds.png
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

SMOOTHED = 9  # steps that a point of a curve is the mean of


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Training curves, a line for each run, and the last validation."
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that have ended")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    options = parser.parse_args()
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    for number, run in enumerate(options.runs):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if "train/em" in row]
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        ends = summary["em_after_by_hops"], summary["searches_by_hops"]
        for axes, key, by_hops in zip(panels, ("train/em", "train/searches"), ends, strict=True):
            values = np.convolve([row[key] for row in rows], np.ones(SMOOTHED) / SMOOTHED, "valid")
            steps = [row["step"] for row in rows][SMOOTHED // 2 :][: len(values)]
            axes.plot(steps, values, color="tab:blue", alpha=0.5)
            for (hops, value), colour in zip(by_hops.items(), ("tab:green", "tab:orange"), strict=False):
                name = None if number else f"test, {hops} hop{'s' * (hops != '1')}"
                axes.plot(rows[-1]["step"] + 4, value, "o", color=colour, alpha=0.6, label=name)
    panels[0].set(xlabel="step", ylabel="exact match, sampled", ylim=(0, 1.02))
    panels[1].set(xlabel="step", ylabel="searches", ylim=(0.9, 2.3))
    for axes in panels:
        axes.legend(frameon=False, loc="lower right" if axes is panels[0] else "upper left")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
