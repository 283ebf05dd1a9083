"""The recorders that a trainer calls to leave its records.

    start -> (log_validation | log_step)* -> finish -> close

After a restart, `start` cuts every record back to the resumed step, so that the files of a killed and resumed
run hold the same as those of an undisturbed run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config import Config, SFTConfig, to_dict, write_yaml
from verl.records.console import make_display, measures_line, outcome_lines, validation_lines
from verl.records.curves import draw_curves
from verl.records.tags import ROLLOUTS_TABLE, table_row
from verl.records.trajectories import TrajectoryFolder, write_page
from verl.utils.json_files import MetricsFile, to_json, write_lines, write_text_atomically
from verl.utils.tracking import Tracking

BRANCHES = "branches"  # folder for the records that a run has left by going back (verl/trainer/rewinds.py)
_PAGE_RECORDS = 240  # trajectories on the page; the JSONL files have all that were logged
_REDRAW_SECONDS = 60.0  # while the run goes, curves and page are drawn at most once in this time


def run_title(config: Config | SFTConfig) -> str:
    """Return the title of a run's pictures and pages.

    It is the run's names, or its folder and environment where nobody has named it.
    """
    trainer = config.trainer
    defaults = type(trainer)()
    names = (trainer.project_name, trainer.experiment_name)
    if names != (defaults.project_name, defaults.experiment_name):
        return " / ".join(names)
    folder = Path(trainer.default_local_dir).name
    if isinstance(config, Config) and config.environment.env_class != "search":
        return f"{folder} / {config.environment.env_class}"
    return folder


class Recorder:
    """The records that every run has: metrics.jsonl, config.yaml, summary.json, loggers and the display.

    `total_steps` is the number of steps that the run will have made at its end.
    """

    def __init__(self, config: Config | SFTConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl")
        self.display = make_display("plain", total_steps, shown=False)
        self.tracking: Tracking | None = None

    def start(self, step: int, resumed_from: Path | None) -> int:
        """Open the records at `step`, and return the last step that is kept, -1 for none.

        Later records of an earlier attempt are cut. On a new start, all records are cut. Raises ValueError if
        a logger's package is not installed.
        """
        trainer = self.config.trainer
        last_kept = step if resumed_from is not None else -1
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics.cut_after(last_kept)
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            [name for name in trainer.logger if name != "console"],  # `display` is the console
            to_dict(self.config),
            self.run_dir,
            first_step=last_kept + 1,
        )
        write_yaml(self.config, self.run_dir / "config.yaml")
        self.display = make_display(trainer.progress, self.total_steps, "console" in trainer.logger)
        if resumed_from is not None:
            self.say(f"resumed from {resumed_from}")
        return last_kept

    def say(self, line: str) -> None:
        self.display.say(line)

    def write(self, step: int, metrics: Mapping[str, Any], texts: Mapping[str, Any] | None = None) -> None:
        """Write one line of metrics; `texts` go only into the file, not to the loggers."""
        assert self.tracking is not None, "start() comes first"
        self.metrics.append(step, {**metrics, **(texts or {})})
        self.tracking.log(metrics, step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text_atomically(self.run_dir / "summary.json", to_json(summary, indent=2) + "\n")

    def close(self) -> None:
        """Close the display and the loggers; it is safe to call this twice, and before the start."""
        self.display.close()
        if self.tracking is not None:
            self.tracking.finish()


class LossRecorder(Recorder):
    """The recorder of a supervised run."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; step 0 holds what was measured before the first."""
        self.write(step, metrics)
        if step:
            self.display.step(step, metrics)
        if "val/loss" in metrics:
            self.say(f"validation at step {step}: loss {metrics['val/loss']:.4f}")

    def finish(self, summary: Mapping[str, Any], model_folder: Path) -> None:
        """Write `summary.json` and say where the model is."""
        self.write_summary(summary)
        self.say(f"done after {summary['steps']} steps; the model is in\n  {model_folder}")


class RunRecorder(Recorder):
    """The recorder of a run of reinforcement learning, which also has trajectories and curves."""

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, total_steps)
        self.trajectories = TrajectoryFolder(self.run_dir / "trajectories")
        self.questions = MetricsFile(self.run_dir / "validation.jsonl")
        self.evaluations = MetricsFile(self.run_dir / "evaluations.jsonl")
        self._drawn_at = time.monotonic()

    def start(self, step: int, resumed_from: Path | None) -> int:
        last_kept = super().start(step, resumed_from)
        self.trajectories.cut_after(last_kept)
        self.questions.cut_after(last_kept)
        self.evaluations.cut_after(last_kept)
        return last_kept

    def first_step(self) -> int:
        """Return the first training step that is recorded; 0 if there is none."""
        return min((row["step"] for row in self.metrics.read() if row["step"] > 0), default=0)

    def keep_branch(self, number: int, after_step: int) -> None:
        """Copy what was recorded after a step to `branches/<number>`, before the run goes back there."""
        branch = self.run_dir / BRANCHES / str(number)
        shutil.rmtree(branch, ignore_errors=True)  # a killed process may have left it half made
        branch.mkdir(parents=True)
        for file in (self.metrics, self.questions, self.evaluations):
            write_lines(branch / file.path.name, [row for row in file.read() if row["step"] > after_step])
        self.trajectories.copy_after(after_step, branch / self.trajectories.path.name)

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        records: list[dict[str, Any]],
        warnings: Sequence[str] = (),
    ) -> None:
        """Record one training step, with `trajectory_records` of some of its rows.

        Warnings are shown, and kept in the step's line of `metrics.jsonl`.
        """
        self.write(step, metrics, {"warnings": list(warnings)} if warnings else {})
        self.trajectories.add(step, records)
        self.display.step(step, metrics)
        for line in warnings:
            self.say(f"warning, step {step}: {line}")

    def log_validation(
        self,
        step: int,
        metrics: dict[str, float],
        summary: Mapping[str, Any],
        records: list[dict[str, Any]],
        questions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record a validation: the results, some trajectories, and the questions.

        The metrics of a validation are part of the step's own line. Before step 1 they are a line.

        Args:
            step: the training step.
            metrics: the metrics of its `ValidationReport`.
            summary: the summary of its `ValidationReport`.
            records: `trajectory_records` of some of its rows.
            questions: a line of `validation.jsonl` for each question.
        """
        if step == 0:
            self.write(0, metrics)
        self.trajectories.add(step, records)
        if records and self.tracking is not None:
            self.tracking.log_table(ROLLOUTS_TABLE, [table_row(record) for record in records], step)
        for question in questions:
            self.questions.append(step, question)
        for line in validation_lines(summary, metrics):
            self.say(f"validation at step {step}: {line}")
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw()

    def log_evaluation(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append a line to `evaluations.jsonl` for each rollout of a set of `trainer.evals`."""
        for line in lines:
            self.evaluations.append(step, line)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write `summary.json`, the curves and the page, and return the summary.

        The summary is that of the trainer's `run_summary`.
        """
        self.write_summary(summary)
        self._draw()
        lines = [f"done after {summary['steps']} steps: {measures_line(summary)}"]
        lines += [str(self.run_dir / name) for name in ("summary.json", "curves.png", "trajectories.html")]
        lines += outcome_lines(summary)
        self.say("\n  ".join(lines))
        return summary

    def _draw(self) -> None:
        title = run_title(self.config)
        branches = [
            MetricsFile(folder / self.metrics.path.name).read()
            for folder in sorted((self.run_dir / BRANCHES).glob("*"))
        ]
        draw_curves(self.metrics.read(), self.run_dir / "curves.png", title, branches)
        records = self.trajectories.read(_PAGE_RECORDS)
        records.sort(key=lambda record: -record["step"])  # the page opens at the first one
        write_page(records, self.run_dir / "trajectories.html", title)
        self._drawn_at = time.monotonic()
