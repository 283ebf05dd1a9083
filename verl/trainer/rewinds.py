"""The return from a collapse to a checkpoint from before it (`trainer.on_collapse: rewind`).

    step N: the monitor sees a collapse that began at step M (verl/trainer/ppo/health.py)
      -> the steps after C are kept in <run folder>/branches/K/     C: the newest checkpoint before step M,
      -> checkpoints after C are renamed                               or the run's start
      -> a line in <run folder>/restarts.jsonl
      -> the run is built anew and goes on from C, with the remedies of all its rewinds

The remedies follow from `restarts.jsonl` alone, so a run that is killed and started again goes on with them.
The line is written last. A run that is killed before that goes on without the remedy, meets the same
collapse, and goes back again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl.checkpoints.file_names import RESTARTS_FILE
from verl.checkpoints.run_state import CheckpointStore, RunStopped
from verl.config import Config, replace_values
from verl.trainer.ppo.health import HealthFinding
from verl.utils.durable import sync
from verl.utils.json_files import read_lines

RATE_FACTOR = 0.5  # factor of the learning rates for each rewind
STEP_BOUND = 0.01  # nats per token: actor.max_step_kl after the first rewind, unless it is smaller already


class CollapseSeen(RunStopped):
    """An error of a run whose policy has collapsed and, by `trainer.on_collapse`, does not go on.

    Args:
        step: number of finished steps.
        finding: the collapse.
        advice: what the user can do, appended to the message.
    """

    def __init__(self, step: int, finding: HealthFinding, advice: str = "") -> None:
        self.step = step
        self.finding = finding
        super().__init__(f"step {step}: {finding.line}{advice}")


@dataclass(frozen=True)
class Rewind:
    """One return of a run to an earlier checkpoint.

    Attributes:
        number: its number among the rewinds of the run, from 1.
        at_step: the step after which it was made.
        from_step: step of the checkpoint that the run went on from; 0 for the start of the run.
        onset: the step at which the collapse began.
        reason: the line of the finding.
    """

    number: int
    at_step: int
    from_step: int
    onset: int
    reason: str

    def remedy(self, config: Config) -> dict[str, float]:
        """Return the values that the run goes on with: key -> value.

        Args:
            config: the run's own configuration, without any remedy.
        """
        factor = RATE_FACTOR**self.number
        actor = config.actor_rollout_ref.actor
        bound = math.inf if actor.max_step_kl is None else actor.max_step_kl
        return {
            "actor_rollout_ref.actor.optim.lr": actor.optim.lr * factor,
            "critic.optim.lr": config.critic.optim.lr * factor,
            "actor_rollout_ref.actor.max_step_kl": min(bound, STEP_BOUND) * RATE_FACTOR ** (self.number - 1),
        }


def rewinds_before(run_dir: Path, step: int) -> list[Rewind]:
    """Return the rewinds in the history of a run that stands after `step`, oldest first.

    A run that is put back further than a rewind went (`trainer.resume_mode=from_path`) has not made it.
    """
    rewinds: list[Rewind] = []
    for line in read_lines(run_dir / RESTARTS_FILE):
        if "rewind" not in line:
            continue
        number = line["rewind"]
        rewinds = rewinds[: number - 1]  # later ones are not in the history of this one
        rewinds.append(Rewind(number, line["at_step"], line["from_step"], line["onset"], line["reason"]))
    while rewinds and rewinds[-1].from_step > step:
        rewinds.pop()
    return rewinds


def with_remedies(config: Config, rewinds: list[Rewind]) -> Config:
    """Return the run's configuration with the remedy of its rewinds."""
    return replace_values(config, rewinds[-1].remedy(config)) if rewinds else config


def step_before(checkpoints: CheckpointStore, onset: int, start: int) -> int:
    """Return the step of the newest checkpoint from before step `onset`; `start` where there is none.

    Args:
        checkpoints: the checkpoints of the run.
        onset: the step at which the collapse began.
        start: the step that the run began with: 0, or that of the checkpoint of another run.
    """
    return max((step for step in checkpoints.steps_anywhere() if step < onset), default=start)


def note_rewind(run_dir: Path, rewind: Rewind, remedy: dict[str, Any]) -> None:
    """Write a rewind's line to `restarts.jsonl`; it is on the disk when this returns."""
    line = {
        "rewind": rewind.number,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "at_step": rewind.at_step,
        "from_step": rewind.from_step,
        "onset": rewind.onset,
        "reason": rewind.reason,
        "remedy": remedy,
    }
    path = run_dir / RESTARTS_FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
    sync(path)
