"""A command of `python -m verl.rl`, over all the orchestrators that it starts one after the other.

An orchestrator that was lost takes its memory along. What the next one has to know is in the run's folder:
the command's restarts in `restarts.jsonl`, and whether a checkpoint is newer than the command.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoints.file_names import NEWEST_STEP_FILE, RESTARTS_FILE


@dataclass(frozen=True)
class Command:
    """What an orchestrator knows of the command that has started it.

    Attributes:
        number: a number that no other command has.
        began: when the command began, in seconds since the epoch.
        death: how the orchestrator before this one died; empty for the first one.
    """

    number: str
    began: float
    death: str = ""

    def newest_step(self, run_dir: Path) -> int | None:
        """Return the step of the newest checkpoint that this command has written; None without one."""
        with suppress(FileNotFoundError):
            tracker = run_dir / NEWEST_STEP_FILE
            if tracker.stat().st_mtime > self.began:
                return int(tracker.read_text())
        return None

    def restarts(self, run_dir: Path) -> list[int]:
        """Return the step from which each restart of this command went on, as the run's folder says."""
        from verl.utils.json_files import read_lines  # imports torch, which the command does without

        records = read_lines(run_dir / RESTARTS_FILE)
        return [record["from_step"] for record in records if record.get("command") == self.number]
