"""trainer.dry_run=true: print the plan of a run, say whether it fits, and end. Nothing is started."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from verl.trainer.dry_run.hardware import hardware_for
from verl.trainer.dry_run.plan import Models, build_plan
from verl.trainer.dry_run.remedies import cheapest_change
from verl.trainer.dry_run.report import report, verdict


def dry_run(config: DictConfig) -> int:
    """Print the plan of a validated configuration. Returns 0 if it fits, else 2, with the reason on stderr.

    Raises:
        ValueError: a model's config.json can't be read, or nothing says what hardware is meant.
    """
    trainer = config.trainer
    hardware = hardware_for(trainer.device, trainer.dry_run_gpu_memory_gb, trainer.dry_run_gpus_per_node)
    models = Models.of(config)
    plan = build_plan(config, hardware, models)
    for line in report(plan, config):
        print(line)
    print()
    if plan.fits:
        print(*verdict(plan, None, config), sep="\n")
        return 0
    for line in verdict(plan, cheapest_change(config, hardware, models), config):
        print(f"error: {line}", file=sys.stderr)
    return 2
