"""LossRecorder: the records of a supervised run: metrics.jsonl, config.yaml, summary.json, and the display.

    start -> log_step* -> finish -> close

After a restart `start` cuts the metrics back to the resumed step, as `RunRecorder` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.utils.records.console import make_display
from verl.utils.records.files import MetricsFile, to_json, write_text_atomically
from verl.utils.tracking import Tracking


class LossRecorder:
    """Writes the files of a run and shows its progress.

    Args:
        config: the whole configuration; `trainer.*` says where and how much.
        total_steps: steps that the run will have made at its end.
    """

    def __init__(self, config: DictConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl")
        self.display = make_display("plain", total_steps, shown=False)
        self.tracking: Tracking | None = None

    def start(self, step: int, resumed_from: Path | None) -> None:
        """Open the records at `step`: later lines of an earlier attempt are cut; all, on a new start.

        Raises:
            ValueError: a logger's package is not installed.
        """
        trainer, kept = self.config.trainer, step if resumed_from is not None else -1
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics.cut_after(kept)
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

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; step 0 holds what was measured before the first."""
        assert self.tracking is not None, "start() comes first"
        self.metrics.append(step, metrics)
        self.tracking.log(metrics, step)
        if step:
            self.display.step(step, metrics)
        if "val/loss" in metrics:
            self.display.say(f"validation at step {step}: loss {metrics['val/loss']:.4f}")

    def finish(self, summary: Mapping[str, Any], model_folder: Path) -> None:
        """Write `summary.json` and say where the model is."""
        write_text_atomically(self.run_dir / "summary.json", to_json(summary, indent=2) + "\n")
        self.display.say(f"done after {summary['steps']} steps; the model is in\n  {model_folder}")

    def close(self) -> None:
        """Close the display and the loggers. Safe to call twice, and before `start`."""
        self.display.close()
        if self.tracking is not None:
            self.tracking.finish()
