"""The table of checks: each has a name and judges facts; `diagnose` runs those that are asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine
from verl.doctor.findings import Finding, merged

Need: TypeAlias = Callable[[Facts], str | None]


@dataclass(frozen=True)
class Check:
    """`about`: the first line of its docstring. `lack`: what it needs and is not in the facts: needs.py."""

    name: str
    about: str
    judge: Callable[[Facts], Iterable[Finding]]
    lack: Need


CHECKS: dict[str, Check] = {}


def check(
    name: str, needs: Need = needs.nothing
) -> Callable[[Callable[[Facts], Iterable[Finding]]], Callable]:
    """Decorator: a function from facts to findings becomes the check `name`. `needs`: one of needs.py."""

    def add(judge: Callable[[Facts], Iterable[Finding]]) -> Callable:
        assert name not in CHECKS and judge.__doc__, name
        CHECKS[name] = Check(name, judge.__doc__.splitlines()[0], judge, needs)
        return judge

    return add


def check_each(
    name: str, needs: Need = needs.nothing
) -> Callable[[Callable[[Facts, Machine], Iterable[Finding]]], Callable]:
    """Decorator: a function of facts and one machine becomes the check `name` of every machine."""

    def add(judge: Callable[[Facts, Machine], Iterable[Finding]]) -> Callable:
        def judge_all(facts: Facts) -> Iterator[Finding]:
            for machine in facts.machines:
                where = (machine.name,) if facts.nodes else ()
                for finding in judge(facts, machine):
                    yield replace(finding, machines=where)

        judge_all.__doc__ = judge.__doc__
        check(name, needs)(judge_all)
        return judge

    return add


def diagnose(facts: Facts, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Finding]:
    """What the checks find in the facts, errors first. `only`: these checks (empty: all); `skip`: not these.

    Raises:
        ValueError: a name that no check has.
    """
    found = []
    for name in chosen(only, skip):
        if CHECKS[name].lack(facts) is None:
            found += [replace(finding, check=name) for finding in CHECKS[name].judge(facts)]
    return merged(found)


def without_a_look(facts: Facts, names: Iterable[str]) -> dict[str, str]:
    """Check -> what it needs, of those that the facts have nothing for."""
    lacks = {name: CHECKS[name].lack(facts) for name in names}
    return {name: lack for name, lack in lacks.items() if lack is not None}


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Names of the checks to run. ValueError for one that is not there."""
    import verl.doctor.checks  # noqa: F401, PLC0415  # fills CHECKS

    for name in (*only, *skip):
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"Found no check named {name!r}{hint}; expected any of: {', '.join(CHECKS)}.")
    return [name for name in CHECKS if (not only or name in only) and name not in skip]
