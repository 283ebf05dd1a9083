"""The kinds of questions that a run has not learnt, by its last validation, or else by its last steps.

A kind of at least `FEWEST_QUESTIONS` questions is not learnt

    if its collapse was reported and the run has not recovered from it, or
    if its value after training is clearly below three quarters of its value before ("lost"), or
    if it is below half of the best kind's and not clearly above its value before.

The value is the exact match. It is the score where an environment or a verifier gives it, and in a run in
which no answer matches exactly. "Clearly" means by more than three standard errors of the difference of two
shares. A value before training that is not known counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl.trainer.ppo.health import training_figures
from verl.trainer.ppo.kinds import kind_words, needs_more_than_one_search

FEWEST_QUESTIONS = 16
Figures = Mapping[str, Mapping[str, Any]]  # of `kind_figures`


def run_outcome(
    before: Mapping[str, Any], after: Mapping[str, Any], health: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Return not_learnt, score_rose and open_collapses, for `summary.json`.

    Args:
        before: the figures of the validation before training, with `kinds`; {} if there was none.
        after: the figures of the validation after training, likewise.
        health: `HealthMonitor.state_dict()` at the end of the run.
        steps: steps that the run has made. A run of no steps has nothing that it should have learnt.

    Returns:
        A dictionary:

        - not_learnt: a list of {kind, em, searches, reason}, the worst first.
        - score_rose: whether the value over all questions is above that before training by two standard
          errors; None if that is not known.
        - open_collapses: a list of {name, onset, line} of the collapses that were reported and from which the
          run has not recovered.
    """
    collapses = [
        {"name": finding["name"], "onset": finding["onset"], "line": finding["line"]}
        for finding in health.get("open", [])
    ]
    outcome: dict[str, Any] = {"not_learnt": [], "score_rose": None, "open_collapses": collapses}
    if steps == 0:
        return outcome
    first: Figures = before.get("kinds") or {}
    last: Figures = after.get("kinds") or {}
    if not last:
        first = training_figures(health, "first")
        last = training_figures(health, "last")
    elif not first:
        first = training_figures(health, "first")
    matches = any(figures["em"] > 0 for kinds in (first, last) for figures in kinds.values())
    outcome["not_learnt"] = _not_learnt(first, last, matches, collapses)
    outcome["score_rose"] = _rose(first, last, matches)
    return outcome


def _not_learnt(
    first: Figures, last: Figures, matches: bool, collapses: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    judged = {kind: figures for kind, figures in last.items() if figures["count"] >= FEWEST_QUESTIONS}
    best = max((_value(figures, matches) for figures in judged.values()), default=0.0)
    onsets = {collapse["name"].partition(":")[2]: collapse["onset"] for collapse in collapses}
    lines = []
    for kind, figures in judged.items():
        earlier = first.get(kind)
        reason = _reason(kind, _value(figures, matches), figures, earlier, matches, best, onsets.get(kind))
        if reason is not None:
            value = _value(figures, matches)
            line = {"kind": kind_words(kind, last), "em": value, "searches": figures["searches"]}
            lines.append(line | {"reason": reason})
    return sorted(lines, key=lambda line: line["em"])


def _reason(
    kind: str,
    now: float,
    figures: Mapping[str, Any],
    earlier: Mapping[str, Any] | None,
    matches: bool,
    best: float,
    lost_at: int | None,
) -> str | None:
    """Return why a kind counts as not learnt; None if it does not."""
    then = 0.0 if earlier is None else _value(earlier, matches)
    error = _standard_error(now, figures["count"], then, (earlier or figures)["count"])
    is_lost = now < 0.75 * then and then - now > 3 * error
    is_behind = now < best / 2 and now - then <= 3 * error
    if not (is_lost or is_behind or lost_at is not None):
        return None
    if needs_more_than_one_search(kind) and 0.8 <= figures["searches"] <= 1.2:
        return "one search for every question"
    if lost_at is not None:
        return f"lost since step {lost_at}"
    if is_lost:
        return f"lost: {then:.3f} before training"
    if earlier is None:
        return f"{figures['searches']:.2g} searches a question"
    return f"{then:.3f} before training, {figures['searches']:.2g} searches a question"


def _rose(first: Figures, last: Figures, matches: bool) -> bool | None:
    """Return whether the value over the kinds that were seen both times has risen beyond chance."""
    kinds = [kind for kind in last if kind in first]
    if not kinds:
        return None
    count = sum(last[kind]["count"] for kind in kinds)
    now = sum(_value(last[kind], matches) * last[kind]["count"] for kind in kinds) / count
    # The kinds have the weights of the last figures: another mixture of kinds is no progress.
    then = sum(_value(first[kind], matches) * last[kind]["count"] for kind in kinds) / count
    earlier_count = sum(first[kind]["count"] for kind in kinds)
    return bool(now - then > 2 * _standard_error(now, count, then, earlier_count))


def _value(figures: Mapping[str, Any], matches: bool) -> float:
    by_score = figures["judged_by"] == "score" or not matches
    return min(max(float(figures["score" if by_score else "em"]), 0.0), 1.0)


def _standard_error(now: float, count: float, then: float, earlier_count: float) -> float:
    """Return the standard error of the difference of two shares, assuming that they are equal."""
    share = (now * count + then * earlier_count) / (count + earlier_count)
    return math.sqrt(share * (1 - share) * (1 / count + 1 / earlier_count))
