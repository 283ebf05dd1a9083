"""The checks put to work: all of them by the command, the quick ones by each run at its start."""

from __future__ import annotations

import importlib.util
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.preflight import machine_checks, ray_checks, run_checks  # noqa: F401  # they fill CHECKS
from verl.preflight.cluster import MachineReport, check_machine, check_nodes, look_at_ray
from verl.preflight.findings import CHECKS, Finding, choose, merge
from verl.preflight.plan import Hardware, build_plan
from verl.preflight.report import report, verdict
from verl.preflight.target import SearchSide, Target


@dataclass(frozen=True)
class Preflight:
    """findings: errors first. looked, idle: names of the checks that had something to look at, and of the
    others. machines: those that were looked at.
    """

    findings: list[Finding]
    looked: list[str]
    idle: list[str]
    machines: list[str]

    @property
    def num_errors(self) -> int:
        return sum(finding.is_error for finding in self.findings)


def look(target: Target, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Preflight:
    """Runs the checks: `only` these (empty: all), `skip` not these. ValueError: a name that no check has."""
    names = choose(only, skip)
    with_ray = target.needs_ray if target.config is not None else importlib.util.find_spec("ray") is not None
    if with_ray:
        target = replace(target, cluster=look_at_ray())
    reports: list[MachineReport] = []
    if target.is_thorough and target.cluster is not None and target.cluster.nodes:
        cluster, reports = check_nodes(target, names)
        target = replace(target, cluster=cluster, reports=tuple(reports))
    if target.reports:
        findings = [replace(f, machines=(report.name,)) for report in reports for f in report.findings]
    else:
        reports = [check_machine(target, names)]
        findings = list(reports[0].findings)
    looked = set().union(*(report.looked for report in reports))
    for name in names:
        if not CHECKS[name].on_machines and (one := CHECKS[name].run(target)) is not None:
            findings += one
            looked.add(name)
    return Preflight(
        merge(findings),
        [name for name in names if name in looked],
        [name for name in names if name not in looked],
        [report.name for report in reports] if target.reports else [socket.gethostname()],
    )


def start_is_sound(config: Any, program: str, probe: SearchSide | None = None) -> bool:
    """The quick part, before Ray and before anything is loaded: prints what it finds, a line each on stderr.

    Args:
        config: the run's validated configuration. `trainer.doctor_skip` names checks to leave out.
        program: name of its schema.

    Returns:
        False if something would stop the run.

    Raises:
        ValueError: a name in `trainer.doctor_skip` is of no check.
    """
    skip = list(config.trainer.doctor_skip)
    choose(skip=skip)
    try:
        preflight = look(Target(config, program, probe, at_start=True), skip=skip)
    except Exception:  # a trouble of the checks' own, on a machine they do not know, must not stop a run
        last = traceback.format_exc().strip().splitlines()[-1]
        print(f"warning: the checks before the start failed, the run goes on: {last}", file=sys.stderr)
        return True
    for finding in preflight.findings:
        print(finding.line, file=sys.stderr)
    return preflight.num_errors == 0


def dry_run(config: Any) -> int:
    """`trainer.dry_run=true`: prints the plan of a validated configuration, and starts nothing.

    Returns:
        0 if it fits, else 2, with the reason on stderr.

    Raises:
        ValueError: a model's config.json can't be read, or nothing says what hardware is meant.
    """
    plan = build_plan(config, Hardware.of(config))
    for line in report(plan, config):
        print(line)
    print()
    for line in verdict(plan, config):
        print(line) if plan.fits else print(f"error: {line}", file=sys.stderr)
    return 0 if plan.fits else 2
