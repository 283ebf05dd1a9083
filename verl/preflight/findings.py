"""Findings, one line each, and the table of checks that make them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One trouble: what is wrong, why it will hurt, what to do. No text ends in a full stop.

    is_error: the run would fail, or work on the wrong thing; otherwise it will run, and hurt.
    check: name of the check that found it. machines: those of the cluster that have it; empty: this one.
    """

    is_error: bool
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
        level = "error" if self.is_error else "warning"
        return " ".join(f"{level}: [{self.check}] {where}{self.what}{why}{do}".split())

    def to_json(self) -> dict[str, Any]:
        """For scripts: {"level": "error" or "warning", "what", "why", "do", "check", "machines"}."""
        plain = asdict(self)
        level = "error" if plain.pop("is_error") else "warning"
        return {"level": level} | plain | {"machines": list(self.machines)}


def error(what: str, why: str = "", do: str = "") -> Finding:
    return Finding(True, what, why, do)


def warning(what: str, why: str = "", do: str = "") -> Finding:
    return Finding(False, what, why, do)


@dataclass(frozen=True)
class Check:
    """find: makes findings of what is looked at. needs: whether there is anything for it to look at.
    on_machines: it looks at each machine of the run, where that is; otherwise once, in the driver.
    """

    name: str
    about: str
    find: Callable[[Any], Iterable[Finding]]
    needs: Callable[[Any], bool]
    on_machines: bool

    def run(self, subject: Any) -> list[Finding] | None:
        """What it finds; None: there was nothing to look at."""
        if not self.needs(subject):
            return None
        return [replace(finding, check=self.name) for finding in self.find(subject)]


CHECKS: dict[str, Check] = {}
Finder = Callable[[Any], Iterator[Finding]]


def check(
    name: str, needs: Callable[[Any], bool] = lambda _: True, on_machines: bool = False
) -> Callable[[Finder], Finder]:
    """Decorator: a function from a Target (on machines: a Machine) to findings becomes the check `name`."""

    def add(find: Finder) -> Finder:
        assert name not in CHECKS and find.__doc__, name
        CHECKS[name] = Check(name, find.__doc__.splitlines()[0], find, needs, on_machines)
        return find

    return add


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Names of the checks to run. ValueError for one that is not there."""
    for name in (*only, *skip):
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"Found no check named {name!r}{hint}; expected any of: {', '.join(CHECKS)}.")
    return [name for name in CHECKS if (not only or name in only) and name not in skip]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """What several machines have in the same words becomes one finding; errors come first."""
    machines: dict[Finding, list[str]] = {}
    for finding in findings:
        names = machines.setdefault(replace(finding, machines=()), [])
        names.extend(name for name in finding.machines if name not in names)
    merged = [replace(finding, machines=tuple(names)) for finding, names in machines.items()]
    return sorted(merged, key=lambda finding: not finding.is_error)
