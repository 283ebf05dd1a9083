"""What the doctor says: findings, one line each, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class Level(str, Enum):
    """error: the run would fail, or work on the wrong thing. warning: it will run, and hurt."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One trouble: what is wrong, why it will hurt, what to type. No text ends in a full stop.

    check: name of the check that found it. machines: those of the cluster that have it; empty: this one, or
    the run itself.
    """

    level: Level
    what: str
    why: str
    do: str
    check: str = ""
    machines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """`error: [name] what: why. Do: what to type`, on one line."""
        where = f"{_names(self.machines)}: " if self.machines else ""
        text = f"{self.level.value}: [{self.check}] {where}{self.what}: {self.why}. Do: {self.do}"
        return " ".join(text.split())


def error(what: str, why: str, do: str) -> Finding:
    return Finding(Level.ERROR, what, why, do)


def warning(what: str, why: str, do: str) -> Finding:
    return Finding(Level.WARNING, what, why, do)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """What several machines have in the same words becomes one finding; errors come first."""
    found: dict[Finding, list[str]] = {}
    for finding in findings:
        machines = found.setdefault(replace(finding, machines=()), [])
        machines.extend(name for name in finding.machines if name not in machines)
    together = [replace(finding, machines=tuple(machines)) for finding, machines in found.items()]
    return sorted(together, key=lambda finding: finding.level is not Level.ERROR)


def num_errors(findings: Iterable[Finding]) -> int:
    return sum(finding.level is Level.ERROR for finding in findings)


def as_json(findings: list[Finding], checks: Iterable[str], others: Mapping[str, str]) -> dict[str, Any]:
    """For scripts: {"errors": 1, "warnings": 0, "checks": [names of those that looked], "without_a_look":
    {name: what it needs}, "findings": [{level, what, ...}]}. others: those of `checks` that did not look."""
    errors = num_errors(findings)
    return {
        "errors": errors,
        "warnings": len(findings) - errors,
        "checks": [name for name in checks if name not in others],
        "without_a_look": dict(others),
        "findings": [
            {**asdict(finding), "level": finding.level.value, "machines": list(finding.machines)}
            for finding in findings
        ],
    }


def _names(machines: tuple[str, ...]) -> str:
    shown = ", ".join(machines[:4])
    return shown if len(machines) <= 4 else f"{shown} and {len(machines) - 4} more"
