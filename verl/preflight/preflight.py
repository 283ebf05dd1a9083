"""Run the checks: all of them for the command, and the quick ones at the start of each run."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from verl.config import Config, SFTConfig
from verl.planning.hardware import Hardware
from verl.planning.memory_plan import Plan, report, verdict
from verl.planning.placement import needs_ray
from verl.preflight.cluster import RAY_CHECKS, check_machine, check_nodes, look_at_ray
from verl.preflight.machine_checks import MACHINE_CHECKS
from verl.preflight.run_checks import HUB_CHECKS, RUN_CHECKS
from verl.preflight.target import Finding, Target, merge
from verl.utils.hub import use_cache_if_hub_is_away
from verl.utils.text import printable

# What can be known on a machine that only submits the run.
LOGIN_CHECKS = (
    *HUB_CHECKS,
    *("writable", "home", "shared-paths", "settings", "no-effect", "batches", "lengths", "model", "uv-hook"),
    *("data", "words", "wandb-key", "wandb-reachable", "checkpoints", "retrieval-flags"),
)
DRIVER_CHECKS = {**RUN_CHECKS, **RAY_CHECKS}
# All checks by name. The first line of a check's docstring says what it finds.
CHECKS = {**HUB_CHECKS, **MACHINE_CHECKS, **DRIVER_CHECKS}


class Preflight(NamedTuple):
    """The result of a preflight.

    Attributes:
        findings: The findings, with errors first.
        num_errors: The number of errors among the findings.
        checks: The names of the checks that were made.
        num_machines: The number of machines that were looked at.
    """

    findings: list[Finding]
    num_errors: int
    checks: list[str]
    num_machines: int


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Return the names of the checks to make.

    Args:
        only: The checks to choose from. All checks if it is empty.
        skip: The checks to leave out.

    Raises:
        ValueError: If there is no check of a name.
    """
    for name in (*only, *skip):
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"Found no check named {name!r}{hint}; expected any of: {', '.join(CHECKS)}.")
    return [name for name in CHECKS if (not only or name in only) and name not in skip]


def run_preflight(target: Target, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Preflight:
    """Make the checks that `choose` selects."""
    names = choose(only, skip)
    if target.at_login:
        names = [name for name in names if name in LOGIN_CHECKS]
    elif target.config is None or needs_ray(target.config):
        target = replace(target, cluster=look_at_ray())
    findings = _find(HUB_CHECKS, target, names)
    if target.is_thorough and target.cluster is not None and target.cluster.nodes:
        target, findings_of_nodes = check_nodes(target, names)
        findings += findings_of_nodes
    if not target.versions:  # no machine of a cluster was asked
        findings += check_machine(target, names)
    findings = merge(findings + _find(DRIVER_CHECKS, target, names))
    num_errors = sum(finding.level == "error" for finding in findings)
    return Preflight(findings, num_errors, names, max(1, len(target.versions)))


def _find(
    checks: Mapping[str, Callable[[Target], Iterator[Finding]]], target: Target, names: Sequence[str]
) -> list[Finding]:
    """Make those of the checks whose names are given."""
    return [
        replace(finding, check=name)
        for name, find in checks.items()
        if name in names
        for finding in find(target)
    ]


def passes_quick_checks(config: Config | SFTConfig, probe: Any = None) -> bool:
    """Make the quick checks before Ray starts and before anything is loaded.

    Each finding is printed as one line on stderr.

    Returns:
        Whether nothing would stop the run.

    Raises:
        ValueError: If a name in `trainer.doctor_skip` is not that of a check.
    """
    skip = config.trainer.doctor_skip
    choose(skip=skip)
    try:
        preflight = run_preflight(Target(config, probe, at_start=True), skip=skip)
    except Exception:  # if the checks themselves fail, on a machine they do not know, the run must not stop
        last = traceback.format_exc().strip().splitlines()[-1]
        line = f"warning: the checks before the start failed, the run goes on: {last}"
        print(printable(line), file=sys.stderr)
        return True
    for finding in preflight.findings:
        print(printable(finding.line), file=sys.stderr)
    return preflight.num_errors == 0


def dry_run(config: Config) -> int:
    """Print the plan of a validated configuration and start nothing (`trainer.dry_run=true`).

    Returns:
        The exit status: 0 if the run fits, and otherwise 2, with the reason on stderr.

    Raises:
        ValueError: If a model's config.json can't be read, or if nothing says what hardware is meant.
    """
    use_cache_if_hub_is_away(Target(config).models)
    plan = Plan(config, Hardware.of(config))
    print("\n".join(report(plan)), end="\n\n")
    for line in verdict(plan):
        print(printable(line)) if plan.fits else print(f"error: {printable(line)}", file=sys.stderr)
    return 0 if plan.fits else 2
