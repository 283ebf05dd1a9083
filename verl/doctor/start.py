"""The quick part of the doctor, at the start of a run: before Ray, and before anything is loaded."""

from __future__ import annotations

import sys
import traceback

from omegaconf import DictConfig

from verl.doctor.collect import collect
from verl.doctor.facts_run import run_of
from verl.doctor.findings import Finding, num_errors
from verl.doctor.registry import chosen, diagnose


def start_is_sound(config: DictConfig, program: str) -> bool:
    """Prints what the quick checks find, a line each on stderr. False if one of them is an error.

    Args:
        config: the run's validated configuration. `trainer.doctor_skip` names checks to leave out.
        program: name of its yaml file.

    Raises:
        ValueError: a name in `trainer.doctor_skip` is of no check.
    """
    skip = list(config.trainer.doctor_skip)
    chosen(skip=skip)
    try:
        findings = look_quickly(config, program, skip)
    except Exception:  # a trouble of the doctor's own, on a machine it does not know, must not stop a run
        last = traceback.format_exc().strip().splitlines()[-1]
        print(f"warning: the checks before the start failed, the run goes on: {last}", file=sys.stderr)
        return True
    for finding in findings:
        print(finding.line, file=sys.stderr)
    return num_errors(findings) == 0


def look_quickly(config: DictConfig, program: str, skip: list[str]) -> list[Finding]:
    """The findings of the quick part."""
    return diagnose(collect(run_of(config, program), quick=True), skip=skip)
