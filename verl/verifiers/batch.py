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
        for name in work:
            if name not in self._made:
                self._made[name] = make_verifier(name, self.settings)

        def verify(name: str) -> list[Verdict]:
            samples = [
                replace(requests[r].sample, label=requests[r].assigned[p].label) for r, p in work[name]
            ]
            try:
                return self._made[name].verify_many(samples)
            except CouldNotVerify as error:
                return [Verdict(None, str(error))] * len(samples)

        verdicts: dict[tuple[int, int], Verdict] = {}
        if work:
            with ThreadPoolExecutor(len(work), "verifier") as pool:
                for name, made in zip(work, pool.map(verify, work), strict=True):
                    verdicts |= zip(work[name], made, strict=True)
        results = []
        for row, request in enumerate(requests):
            total: float | None = 0.0
            report = []
            for place, each in enumerate(request.assigned):
                verifier, verdict = self._made[each.name], verdicts[row, place]
                score = verdict.score
                if score is None:
                    total = None if each.weight else total
                elif math.isnan(score):
                    raise ValueError(f"verifier {verifier.name!r} returned the score nan; expected a number")
                else:
                    score = min(max(float(score), verifier.low), verifier.high)
                    total = None if total is None else total + each.weight * score
                report.append({**vars(verdict), "name": verifier.name, "weight": each.weight, "score": score})
            results.append(Result(total, report))
        return results

    def close(self) -> None:
        """Ends what the verifiers have started."""
        made, self._made = self._made, {}
        for verifier in made.values():
            verifier.close()


def verifier_metrics(verdicts: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, float]:
    """Figures of all verdicts of a step, those of rows that left the batch too.

    Args:
        verdicts: of each row, `Result.verdicts`, or None for rows without verifiers.

    Returns:
        objective/{name}_reward (mean of weight * score of a row) and objective/{name}_correct_rate (share of
        rows above 0), Open-Instruct's names, over rows with a verdict; reward/unverified/{name} and
        reward/timeout/{name} (verdicts); reward/cost (US dollars).
    """
    metrics: dict[str, float] = defaultdict(float)
    totals: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # name -> row -> reward
    for row, reports in enumerate(verdicts):
        for each in reports or ():
            name, score = each["name"], each["score"]
            if score is not None:
                totals[name][row] += each["weight"] * score
            metrics[f"reward/unverified/{name}"] += score is None
            metrics[f"reward/timeout/{name}"] += each["timed_out"]
            metrics["reward/cost"] += each["cost"]
    for name, rewards in totals.items():
        values = np.array(list(rewards.values()))
        metrics[f"objective/{name}_reward"] = float(values.mean())
        metrics[f"objective/{name}_correct_rate"] = float((values > 0).mean())
    return dict(metrics)
