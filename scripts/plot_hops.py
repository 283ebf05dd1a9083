"""Draws exact match by hops, before and after runs of configs/hops.yaml, and its course over their steps.

python scripts/plot_hops.py verl_checkpoints/hops-seed0-... --out docs/hops.png
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import matplotlib.pyplot as plt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact match by hops, sampled; a line for each run.")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that have ended")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    options = parser.parse_args()
    figure, (falls, course) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for number, run in enumerate(options.runs):
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        for when, label, colour in (("before", "1 and 2", "tab:gray"), ("after", "1 to 3", "tab:blue")):
            by_hops = summary[f"em_{when}_by_hops"] | summary[f"extra_em_{when}_by_hops"]
            name = None if number else f"after training on {label} hops"
            falls.plot(list(by_hops), list(by_hops.values()), "o-", color=colour, alpha=0.6, label=name)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for hops, colour in (("1", "tab:green"), ("2", "tab:orange"), ("3", "tab:red")):
            key = f"val/sampled/em/hops_{hops}"
            points = [(row["step"], row[key]) for row in rows if key in row]
            name = None if number else f"{hops} hop{'s' * (hops != '1')}"
            course.plot(*zip(*points, strict=True), "o-", color=colour, alpha=0.6, label=name)
    falls.set(xlabel="hops of the question", ylabel="exact match, sampled", ylim=(0, 1.02))
    course.set(xlabel="step")
    for axes in (falls, course):
        axes.legend(frameon=False, loc="center left" if axes is falls else "lower right")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
