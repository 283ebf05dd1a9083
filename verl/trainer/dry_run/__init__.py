"""The plan of a run without running it: who goes where, and how much memory each device needs."""

from verl.trainer.dry_run.run import dry_run

__all__ = ["dry_run"]
