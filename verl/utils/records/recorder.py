"""RunRecorder: what the trainer calls to leave its records.

    start -> (log_validation | log_step)* -> finish -> close

After a restart `start` cuts every record back to the resumed step, so that the files of a killed and resumed
run hold what those of an undisturbed one hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl.utils.records.console import make_display, validation_lines
from verl.utils.records.curves import draw_curves
from verl.utils.records.files import MetricsFile, to_json, write_text_atomically
from verl.utils.records.summary import build_summary
from verl.utils.records.trajectories import TrajectoryFolder, write_page
from verl.utils.tracking import Tracking

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.ppo.run_state import RunState
    from verl.trainer.ppo.validation import ValidationReport

_PAGE_RECORDS = 240  # trajectories on the page; the JSONL files have all that were logged
_REDRAW_SECONDS = 60.0  # curves and page are drawn again at most this often while the run goes


class RunRecorder:
    """Writes the files of a run and shows its progress.

    Args:
        config: the whole configuration; `trainer.*` says where and how much.
        total_steps: steps that the run will have made at its end.
    """

    def __init__(self, config: DictConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl")
        self.trajectories = TrajectoryFolder(self.run_dir / "trajectories")
        self.display = make_display("plain", total_steps, shown=False)
        self.tracking: Tracking | None = None
        self._drawn_at = time.monotonic()

    def start(self, state: RunState, resumed_from: Path | None) -> None:
        """Open the records at `state.step`: later lines of an earlier attempt are cut; all, on a new start.

        Raises:
            ValueError: a logger's package is not installed.
        """
        trainer = self.config.trainer
        kept = state.step if resumed_from is not None else -1
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics.cut_after(kept)
        self.trajectories.cut_after(kept)
        self.tracking = Tracking(
            list(trainer.logger),
            trainer.project_name,
            trainer.experiment_name,
            self.run_dir,
            OmegaConf.to_container(self.config, resolve=True),  # type: ignore[arg-type]
            first_step=kept + 1,
        )
        OmegaConf.save(self.config, self.run_dir / "config.yaml")
        self.display = make_display(trainer.progress, self.total_steps, "console" in trainer.logger)
        if resumed_from is not None:
            self.display.say(f"resumed from {resumed_from}")

    def log_step(
        self,
        state: RunState,
        metrics: dict[str, float],
        batch: DataProto,
        records: list[dict[str, Any]],
        warnings: Sequence[str] = (),
    ) -> None:
        """Record one training step.

        Args:
            state: after the step.
            metrics: of the step; `train/em` and `train/searches` are made from the batch if not there.
            batch: the step's trajectories; of each row em and trajectory are looked at.
            records: `trajectory_records` of some of them.
            warnings: lines that are shown, and kept as `warnings` in the step's line of `metrics.jsonl`.
        """
        fields = batch.non_tensor_batch
        metrics = {
            "train/em": float(np.mean(fields["em"].astype(float))),
            "train/searches": float(np.mean([t["num_searches"] for t in fields["trajectory"]])),
            **metrics,
        }
        self._write(state.step, metrics, {"warnings": list(warnings)} if warnings else {})
        self.trajectories.add(state.step, records)
        self.display.step(state.step, metrics)
        for line in warnings:
            self.display.say(f"warning, step {state.step}: {line}")

    def log_validation(
        self, state: RunState, report: ValidationReport, records: list[dict[str, Any]]
    ) -> None:
        """Record a validation. Its metrics are part of the step's own line; before step 1 they are a line.
        `records`: `trajectory_records` of some of its rows.
        """
        metrics = report.metrics()
        if state.step == 0:
            self._write(0, metrics)
        self.trajectories.add(state.step, records)
        for line in validation_lines(report.summary(), metrics):
            self.display.say(f"validation at step {state.step}: {line}")
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw()

    def finish(self, state: RunState, wall_seconds: float) -> dict[str, Any]:
        """Write `summary.json`, the curves and the page; returns the summary."""
        summary = build_summary(self.config, state, wall_seconds)
        write_text_atomically(self.run_dir / "summary.json", to_json(summary, indent=2) + "\n")
        self._draw()
        before, after = (_percent(summary[key]) for key in ("em_before", "em_after"))
        self.display.say(
            f"done after {state.step} steps: exact match {before} before, {after} after training\n"
            f"  {self.run_dir / 'summary.json'}\n  {self.run_dir / 'curves.png'}\n"
            f"  {self.run_dir / 'trajectories.html'}"
        )
        return summary

    def close(self) -> None:
        """Close the display and the loggers. Safe to call twice, and before `start`."""
        self.display.close()
        if self.tracking is not None:
            self.tracking.finish()

    def _write(self, step: int, metrics: dict[str, float], texts: Mapping[str, Any] | None = None) -> None:
        assert self.tracking is not None, "start() comes first"
        self.metrics.append(step, metrics | dict(texts or {}))
        self.tracking.log(metrics, step)

    def _draw(self) -> None:
        title = f"{self.config.trainer.project_name} / {self.config.trainer.experiment_name}"
        draw_curves(self.metrics.read(), self.run_dir / "curves.png", title)
        write_page(self.trajectories.read(_PAGE_RECORDS), self.run_dir / "trajectories.html", title)
        self._drawn_at = time.monotonic()


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
