"""Kinds of questions: a kind has one environment, one data source and one number of hops.

    rows of a step      --kind_metrics-->  kinds/<kind>/{em,score,searches,count,questions}
    rows of validation  --kind_figures-->  {kind: {em, score, searches, count, judged_by}}

The mean over all rows hides a kind that a run does not learn, or learns and then loses.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from verl.environments.registry import SEARCH

MAX_KINDS = 16  # kinds that are reported of one step or one validation: the most frequent ones
PREFIX = "kinds/"
_HOPS = re.compile(r"(?:(?P<source>.*)\.)?hops_(?P<hops>[^.]+)")


def kind_of(environment: str | None, data_source: Any, hops: Any) -> str:
    """Return the name of a row's kind, such as `nq`, `microworld.hops_2` or `maze.Maze`.

    Args:
        environment: name of the row's environment; None or "search" for searches.
        data_source: the row's column of that name.
        hops: how many searches the question needs; None if the data does not say.
    """
    source = None if data_source is None else str(data_source)
    named = None if environment == SEARCH else environment
    names = [name for name in dict.fromkeys([named, source]) if name]
    if hops is not None and hops == hops:  # not NaN
        names.append(f"hops_{hops}")
    return re.sub("[/:]", ".", ".".join(names)) or "unnamed"


def kind_words(kind: str, kinds: Collection[str]) -> str:
    """Return a kind's name for a reader: "2 hops", or "2 hops of nq" where `kinds` have several sources."""
    match = _HOPS.fullmatch(kind)
    if match is None:
        return kind
    words = f"{match['hops']} hop{'s' * (match['hops'] != '1')}"
    matches = [_HOPS.fullmatch(other) for other in kinds]
    sources = {None if other is None else other["source"] for other in matches}
    if match["source"] and len(sources) > 1:
        return f"{words} of {match['source']}"
    return words


def needs_more_than_one_search(kind: str) -> bool:
    """Return whether the name of a kind says that its questions need several searches."""
    match = _HOPS.fullmatch(kind)
    return match is not None and match["hops"] != "1"


def most_frequent(kinds: Sequence[str]) -> list[str]:
    """Return the `MAX_KINDS` most frequent kinds, ties in the order of their names."""
    counts = Counter(kinds)
    return sorted(counts, key=lambda kind: (-counts[kind], kind))[:MAX_KINDS]


def kind_metrics(
    kinds: Sequence[str],
    uids: Sequence[Any],
    em: Sequence[float],
    scores: Sequence[float],
    searches: Sequence[int],
) -> dict[str, float]:
    """Return `kinds/<kind>/..` of N rows: means of em, score and searches, and counts of rows and questions.

    Args:
        kinds: the kind of each row.
        uids: the uid of each row; the rows of one question share theirs.
        em: the exact match of each row.
        scores: the score of each row.
        searches: the number of searches of each row.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, kind in enumerate(kinds):
        rows_of[kind].append(row)
    metrics: dict[str, float] = {}
    for kind in most_frequent(kinds):
        rows = rows_of[kind]
        metrics |= {
            f"{PREFIX}{kind}/em": float(np.mean([em[row] for row in rows])),
            f"{PREFIX}{kind}/score": float(np.mean([scores[row] for row in rows])),
            f"{PREFIX}{kind}/searches": float(np.mean([searches[row] for row in rows])),
            f"{PREFIX}{kind}/count": float(len(rows)),
            f"{PREFIX}{kind}/questions": float(len({uids[row] for row in rows})),
        }
    return metrics


def by_kind(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Undo the naming of `kind_metrics`; return kind -> name -> value."""
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        if name.startswith(PREFIX):
            kind, _, figure = name.removeprefix(PREFIX).rpartition("/")
            figures[kind][figure] = float(value)
    return dict(figures)


def kind_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind of validation question.

    Args:
        rows: records as `question_records` of the validation makes them.

    Returns:
        Kind -> em, score, searches (means), count, and judged_by. That is "score" if the score of some row is
        an environment's or a verifier's, so that the exact match says little, and otherwise "em".
    """
    rows_of: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    kinds = [kind_of(row["env_class"], row["data_source"], row["hops"]) for row in rows]
    for kind, row in zip(kinds, rows, strict=True):
        rows_of[kind].append(row)
    figures: dict[str, dict[str, Any]] = {}
    for kind in most_frequent(kinds):
        members = rows_of[kind]
        figures[kind] = {
            name: float(np.mean([row[name] for row in members])) for name in ("em", "score", "searches")
        }
        figures[kind]["count"] = len(members)
        is_scored = any(row["judged_by"] == "score" for row in members)
        figures[kind]["judged_by"] = "score" if is_scored else "em"
    return figures
