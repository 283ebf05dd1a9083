"""What a check finds: one trouble, in one line for people and as a dictionary for scripts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Finding:
    """One trouble: what is wrong, why it will hurt, what to do. No text ends in a full stop.

    Attributes:
        level: "error" (the run would fail, or work on the wrong thing) or "warning" (it will run, and hurt).
        check: name of the check that found it. machines: those of the cluster that have it; empty: this one.
    """

    level: str
    what: str
    why: str = ""
    do: str = ""
    check: str = ""
    machines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """`error: [check] machines: what: why. Do: what to type`, on one line."""
        shown = ", ".join(self.machines[:4])
        more = f" and {len(self.machines) - 4} more" if len(self.machines) > 4 else ""
        where = f"{shown}{more}: " if shown else ""
        why, do = f": {self.why}" if self.why else "", f". Do: {self.do}" if self.do else ""
        return " ".join(f"{self.level}: [{self.check}] {where}{self.what}{why}{do}".split())


def error(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("error", what, why, do)


def warning(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("warning", what, why, do)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """What several machines have in the same words becomes one finding; errors come first."""
    machines: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        alike = replace(finding, machines=())
        machines[alike] = machines.get(alike, ()) + finding.machines
    merged = [replace(finding, machines=names) for finding, names in machines.items()]
    return sorted(merged, key=lambda finding: finding.level)
