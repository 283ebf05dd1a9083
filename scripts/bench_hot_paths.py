"""Hot paths of this checkout beside those of another commit, by turns.

    python scripts/bench_hot_paths.py scoring --reference COMMIT      rewards of a step
    python scripts/bench_hot_paths.py update size=30M prompt=2048 completion=128 group=8
    python scripts/bench_hot_paths.py attention tokens=8128 heads=8 width=64 dtype=bf16

Each side is a process of its own with one thread (scripts/bench/hot_path.py says what a path does), and the
settings of both are those of the command line. In each round either side measures once, in alternating order;
the first round is a warm-up. Without --reference this checkout is measured alone.

Prints a table in Markdown: medians over the rounds, and the ratio of the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
from scripts.bench.servers import ENVIRONMENT  # noqa: E402

DEFAULTS: dict[str, dict[str, Any]] = {
    "scoring": {"trajectories": 1024, "observed": 500, "reader": "default"},
    "update": {"size": "30M", "prompt": 2048, "completion": 128, "group": 8, "dtype": "fp32"},
    "attention": {"tokens": 8128, "heads": 8, "width": 64, "dtype": "bf16"},
}
HERE = "this checkout"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        yield Path(name)


class Side:
    """A process that measures a path in a checkout."""

    def __init__(self, folder: Path, path: str, settings: dict[str, Any]) -> None:
        program = str(ROOT / "scripts" / "bench" / "hot_path.py")
        self.process = subprocess.Popen(
            [sys.executable, program, path, json.dumps(settings)],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rounds: list[dict[str, float]] = []

    def measure(self) -> None:
        """Measure one round.

        Raises:
            RuntimeError: the process ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"the process ended with {self.process.wait()}")
        self.rounds.append(json.loads(answer))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def table(sides: dict[str, Side]) -> str:
    """Return the medians in Markdown."""
    names = list(next(iter(sides.values())).rounds[0])
    medians = {
        side: {name: median(figures[name] for figures in measured.rounds[1:]) for name in names}
        for side, measured in sides.items()
    }
    lines = [f"| | {' | '.join(names)} | times as fast |", f"|---|{'---|' * (len(names) + 1)}"]
    for side, figures in medians.items():
        cells = [f"{figures[name]:.4g}" for name in names]
        ratio = list(medians.values())[-1]["seconds"] / figures["seconds"]
        lines.append(f"| {side} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", choices=DEFAULTS)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help=f"defaults: {DEFAULTS}")
    parser.add_argument("--reference", help="commit of the other side (default: this checkout alone)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args()
    settings = dict(DEFAULTS[options.path])
    for setting in options.settings:
        name, _, value = setting.partition("=")
        if name not in settings:
            parser.error(f"Found {setting!r}; expected NAME=VALUE with a name of {', '.join(settings)}.")
        settings[name] = type(settings[name])(value)
    with ExitStack() as stack:
        sides = {HERE: Side(ROOT, options.path, settings)}
        if options.reference:
            folder = stack.enter_context(checkout(options.reference))
            sides[options.reference] = Side(folder, options.path, settings)
        for side in sides.values():
            stack.callback(side.close)
        for number in range(options.rounds + 1):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                sides[name].measure()
                print(f"round {number}, {name}: {sides[name].rounds[-1]}", file=sys.stderr, flush=True)
        print(f"{options.path} {json.dumps(settings)}\n\n{table(sides)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
