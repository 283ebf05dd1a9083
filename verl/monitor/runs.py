"""Runs as they stand in their folders: how far they came, their figures, failed rollouts and curves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from verl.records.curves import draw_panels, environments_in
from verl.records.tags import TAGS, environment_of, tags_of
from verl.records.trajectories import TrajectoryFolder
from verl.utils.json_files import last_steps, read_lines

EXACT_MATCH = "Exact match"
# Picture -> panel -> metrics. For each metric the steps that have it are drawn.
PICTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {
        "Policy loss": ("actor/pg_loss", "train/loss", "val/loss"),
        "Entropy (nats per token)": ("actor/entropy_loss",),
        "KL of trainer and rollouts": ("rollout_corr/kl", "actor/kl_loss", "actor/ppo_kl"),
        "Critic's loss": ("critic/vf_loss",),
    },
    "reward": {
        "Reward": ("critic/score/mean",),
        EXACT_MATCH: ("train/em", "val/sampled/em", "val/greedy/em"),
        "Searches": ("train/searches",),
        "Length (tokens the policy wrote)": ("response_length/mean",),
    },
    "optimizer": {
        "Gradient norm": ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"),
        "Learning rate": ("actor/lr", "train/lr"),
        "Trained tokens per second": ("perf/trained_tokens_per_second", "perf/tokens_per_second"),
        "Seconds of a step": ("timing_s/step",),
    },
}
# The rows of a table: name -> metrics, of which the first that a run has is shown.
TABLE = {
    "loss": ("actor/pg_loss", "train/loss"),
    "entropy": ("actor/entropy_loss",),
    "mismatch_kl": ("rollout_corr/kl",),
    "reward": ("critic/score/mean",),
    "EM": ("train/em",),
    "validation EM": ("val/sampled/em", "val/greedy/em"),
    "validation reward": (),  # that of environments, whose metrics have their names
    "validation loss": ("val/loss",),
    "generated tokens/s": ("perf/generated_tokens_per_second", "rollout/tokens_per_second"),
    "trained tokens/s": ("perf/trained_tokens_per_second", "perf/tokens_per_second"),
    "step s": ("timing_s/step",),
}


class Run:
    """The run in one folder."""

    def __init__(self, folder: Path) -> None:
        """Read a run. Raises ValueError if the folder is not that of a run."""
        self.folder = folder
        if not (folder / "metrics.jsonl").is_file() and not (folder / "config.yaml").is_file():
            raise ValueError(
                f"Found no metrics.jsonl in {folder}; expected the folder of a run (--list names them)"
            )
        self.rows = read_lines(folder / "metrics.jsonl")
        self.state = state_of(folder)

    @property
    def environments(self) -> list[str]:
        """Return the names of the environments that give the run's rewards."""
        return environments_in(self.rows)

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def age(self) -> float:
        """Return the number of seconds since the run wrote its last line."""
        with suppress(OSError):
            return time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        return float("inf")

    def last(self, name: str) -> float | None:
        """Return the newest value of a name of TABLE, or None if there is none.

        Answers in environments are judged by their rewards alone, so that there is no exact match.
        """
        if name == "validation reward":
            metrics = tuple(f"val/test_score/{environment}" for environment in self.environments)
        elif name in ("EM", "validation EM") and self.environments and "search" not in self.environments:
            metrics = ()
        else:
            metrics = TABLE[name]
        for metric in metrics:
            if points := last_steps(self.rows, metric):
                return float(points[-1][1])
        return None

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rollouts that the run has kept, the newest first, with their `tags` and `environment`."""
        trajectories = TrajectoryFolder(self.folder / "trajectories")
        for step in reversed(trajectories.steps()):
            for record in reversed(read_lines(trajectories.path / f"step_{step}.jsonl")):
                yield record | {"tags": tags_of(record), "environment": environment_of(record)}

    def failures(
        self, threshold: float, max_samples: int, max_scanned: int | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, Counter[str]]]:
        """Return the newest rollouts below a reward, and counts of tags.

        Args:
            threshold: A rollout with a smaller reward, or without one, has failed.
            max_samples: Maximum number of rollouts to return.
            max_scanned: Number of the newest rollouts to look at. None means all that are kept.

        Returns:
            The failed rollouts; and for each environment how many rollouts have each tag ("rollouts" is their
            number).
        """
        samples: list[dict[str, Any]] = []
        counts: dict[str, Counter[str]] = {}
        for record in islice(self.records(), max_scanned):
            score = record.get("score")
            tag_counts = counts.setdefault(record["environment"], Counter())
            tag_counts.update(["rollouts", *record["tags"]])
            if len(samples) < max_samples and (score is None or score < threshold):
                samples.append(record)
        return samples, counts

    def pictures(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return PICTURES, with the rewards of the run's environments in place of the exact match."""
        if not self.environments:
            return PICTURES
        heads = ("env/{}/reward", "val/test_score/{}")
        rewards = tuple(head.format(name) for name in self.environments for head in heads)
        panels = dict(PICTURES["reward"])
        replaced = {("Environments" if name == EXACT_MATCH else name): panels[name] for name in panels}
        return PICTURES | {"reward": replaced | {"Environments": rewards}}

    def draw(self, folder: Path) -> list[Path]:
        """Draw loss.png, reward.png and optimizer.png from the metrics that exist, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, panels in self.pictures().items():
            path = folder / f"{name}.png"
            if draw_panels(self.rows, panels, path, f"{self.folder.name}: {name}"):
                paths.append(path)
        return paths


def state_of(folder: Path) -> str:
    """Return the state of the run in a folder: "running" (on this machine), "finished" or "stopped"."""
    with suppress(OSError):  # the lock is read but never taken, because a run that begins now must get it
        inode = (folder / "run.lock").stat().st_ino
        if f":{inode} " in Path("/proc/locks").read_text(encoding="utf-8"):
            return "running"
    return "finished" if (folder / "summary.json").is_file() else "stopped"


def runs_below(root: Path) -> list[Run]:
    """Return all runs in a folder, the newest first."""
    folders = [path.parent for path in root.glob("**/metrics.jsonl")]
    return sorted(map(Run, folders), key=lambda run: run.age)


def share_of_tags(counts: Mapping[str, Counter[str]]) -> list[tuple[str, int, list[tuple[str, float]]]]:
    """Return (environment, number of rollouts, [(tag, share)]) from the counts of `failures`.

    Tags that no rollout has are left out.
    """
    return [
        (name, count["rollouts"], [(tag, count[tag] / count["rollouts"]) for tag in TAGS if count[tag]])
        for name, count in sorted(counts.items())
    ]
