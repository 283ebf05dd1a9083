"""The verifiers of a run, over the rows of a batch.

    Request (row, what it is assigned, its response) -> all verifiers at once, each with all of its rows
        -> Result of each row: score (None: could not verify), and a report of every verdict

Verifiers of different names work at the same time, in threads: a judge that waits holds up no math.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.verifiers.base import CouldNotVerify, Sample, Verdict, Verifier, VerifierSettings
from verl.verifiers.registry import Assigned, make_verifier

UNVERIFIED = "unverified"  # finish reason of a trajectory without a verdict


@dataclass(frozen=True)
class Request:
    """A response (its label is not read here) and the verifiers that its row names."""

    sample: Sample
    assigned: Sequence[Assigned]


@dataclass(frozen=True)
class Result:
    """score: the sum of weight * score, or None where a verifier of some weight has no verdict. verdicts: one
    plain dictionary for each verifier: name, score, weight, cost, timed_out, detail.
    """

    score: float | None
    verdicts: list[dict[str, Any]]


class Verifiers:
    """Makes each verifier when it is first asked for, and keeps it to the end of the run."""

    def __init__(self, settings: VerifierSettings) -> None:
        self.settings = settings
        self._made: dict[str, Verifier] = {}

    def verify(self, requests: Sequence[Request]) -> list[Result]:
        """The result of each row, in order.

        Raises:
            ValueError: an unknown name, or a score that is no number. VerifierLimit: the run may not go on.
        """
        work: dict[str, list[tuple[int, int]]] = defaultdict(list)  # name -> row, place among the row's
        for row, request in enumerate(requests):
            for place, each in enumerate(request.assigned):
                work[each.name].append((row, place))
        verdicts: list[list[Verdict]] = [[Verdict(None)] * len(request.assigned) for request in requests]
        for name in work:
            if name not in self._made:
                self._made[name] = make_verifier(name, self.settings)

        def verify(name: str) -> list[Verdict]:
            places = work[name]
            samples = [replace(requests[r].sample, label=requests[r].assigned[p].label) for r, p in places]
            try:
                return self._made[name].verify_many(samples)
            except CouldNotVerify as error:
                return [Verdict(None, str(error))] * len(samples)

        if work:
            with ThreadPoolExecutor(len(work), "verifier") as pool:
                for name, many in zip(work, pool.map(verify, work), strict=True):
                    for (row, place), verdict in zip(work[name], many, strict=True):
                        verdicts[row][place] = _clipped(verdict, self._made[name])
        pairs = zip(requests, verdicts, strict=True)
        return [_result(request.assigned, each, self._made) for request, each in pairs]

    def close(self) -> None:
        """Ends what the verifiers have started."""
        made, self._made = self._made, {}
        for verifier in made.values():
            verifier.close()


def _clipped(verdict: Verdict, verifier: Verifier) -> Verdict:
    if verdict.score is None:
        return verdict
    score = float(verdict.score)
    if math.isnan(score):
        raise ValueError(f"verifier {verifier.name!r} returned the score nan; expected a number or None")
    return replace(verdict, score=min(max(score, verifier.low), verifier.high))


def _result(
    assigned: Sequence[Assigned], verdicts: Sequence[Verdict], made: Mapping[str, Verifier]
) -> Result:
    total: float | None = 0.0
    report = []
    for each, verdict in zip(assigned, verdicts, strict=True):
        if verdict.score is None:
            total = None if each.weight else total
        elif total is not None:
            total += each.weight * verdict.score
        report.append({"name": made[each.name].name, "weight": each.weight, **vars(verdict)})
    return Result(total, report)


def verifier_metrics(verdicts: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, float]:
    """Figures of all verdicts of a step, those of rows that left the batch too.

    Args:
        verdicts: of each row, `Result.verdicts`, or None for rows without verifiers.

    Returns:
        objective/{name}_reward (mean of weight * score of a row) and objective/{name}_correct_rate (share of
        rows above 0), Open-Instruct's names, over rows with a verdict; reward/unverified/{name} and
        reward/timeout/{name} (verdicts); reward/cost (US dollars).
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    metrics: dict[str, float] = {}
    for row in verdicts:
        totals: dict[str, float] = {}
        for each in row or ():
            name, score = each["name"], each["score"]
            if score is not None:
                totals[name] = totals.get(name, 0.0) + each["weight"] * score
            for key, count in (
                (f"reward/unverified/{name}", float(score is None)),
                (f"reward/timeout/{name}", float(each["timed_out"])),
                ("reward/cost", each["cost"]),
            ):
                metrics[key] = metrics.get(key, 0.0) + count
        for name, total in totals.items():
            rewards[name].append(total)
    for name, values in rewards.items():
        metrics[f"objective/{name}_reward"] = float(np.mean(values))
        metrics[f"objective/{name}_correct_rate"] = float(np.mean(np.array(values) > 0))
    return metrics
