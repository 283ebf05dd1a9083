"""What became of a batch's episodes: the failures that stop a run, and the figures of each environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.config import Config
from verl.environments.base import BaseTextEnv
from verl.environments.registry import SEARCH, load_class
from verl.trainer.ppo.run_state import EnvironmentsFailed, SearchesFailed

Records = Sequence[Mapping[str, Any]] | np.ndarray


def environment_of(record: Mapping[str, Any]) -> str:
    return record.get("env_class", SEARCH)


class FailureWatch:
    """Looks at each generation for episodes that ended for another reason than the policy's."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        """say: takes one line for the user; the first failure of each environment is told."""
        self.config, self.say = config, say
        self._told: set[str] = set()

    def check(self, records: Records) -> None:
        """
        Raises:
            SearchesFailed, EnvironmentsFailed: so many failed that the rest says little about the policy.
                What is left leans to trajectories that did not search, or ended before a server went away.
        """
        searches = [str(_error_of(each)) for each in records if each["finish_reason"] == "search_failed"]
        limit = self.config.retriever.max_failed_share
        if len(searches) > limit * len(records) or len(searches) == len(records):
            raise SearchesFailed(
                f"{len(searches)} of {len(records)} trajectories ended because a search failed "
                f"(retriever.max_failed_share={limit:g}): {searches[-1]}"
            )
        failed = [each for each in records if each["finish_reason"] in ("env_failed", "unverified")]
        for each in failed:
            env_class = environment_of(each)
            if env_class not in self._told:
                self._told.add(env_class)
                self.say(f"environment {env_class}: an episode failed and is left out: {_error_of(each)}")
        limit = self.config.environment.max_failed_share
        if len(failed) > limit * len(records) or (failed and len(failed) == len(records)):
            names = ", ".join(sorted({environment_of(each) for each in failed}))
            raise EnvironmentsFailed(
                f"{len(failed)} of {len(records)} trajectories ended because {names} failed "
                f"(environment.max_failed_share={limit:g}): {_error_of(failed[-1])}"
            )


def _error_of(record: Mapping[str, Any]) -> str:
    errors = [turn["error"] for turn in record["turns"] if turn.get("error")]
    return record.get("env_error") or (errors[0] if errors else "unknown")


def environment_metrics(records: Records, scores: Sequence[float | None]) -> dict[str, float]:
    """`env/<environment>/..` of a batch in which other environments than searches are.

    reward (mean, of those with a score), turns (mean), failed and unverified (counts), steps_failed (those
    that a step has ended), seconds_init, seconds_step (means of a call), and what the environment's class
    makes of its own figures. A ":" in a name is a "." here.

    Args:
        scores: of each record; None: it has none, as it failed or could not be verified.
    """
    metrics: dict[str, float] = {}
    names = dict.fromkeys(map(environment_of, records))
    if set(names) <= {SEARCH}:
        return metrics
    for name in names:
        rows = [(each, x) for each, x in zip(records, scores, strict=True) if environment_of(each) == name]
        of_class, known = [each for each, _ in rows], [score for _, score in rows if score is not None]
        reasons = [each["finish_reason"] for each in of_class]
        figures = {
            "turns": float(np.mean([len(each["turns"]) for each in of_class])),
            "failed": float(reasons.count("env_failed")),
            "unverified": float(reasons.count("unverified")),
        }
        if known:
            figures["reward"] = float(np.mean(known))
        if name != SEARCH:
            num_steps = sum(len(each["turns"]) for each in of_class)
            figures["steps_failed"] = float(
                sum(bool(each["env_error"] and each["turns"]) for each in of_class)
            )
            figures["seconds_init"] = float(np.mean([each["env_seconds_init"] for each in of_class]))
            figures["seconds_step"] = sum(each["env_seconds_step"] for each in of_class) / max(num_steps, 1)
            figures |= _own_figures(name, [each["env_metrics"] for each in of_class if each["env_metrics"]])
        metrics |= {f"env/{name.replace(':', '.')}/{key}": value for key, value in figures.items()}
    return metrics


def _own_figures(env_class: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    aggregate = getattr(load_class(env_class), "aggregate_metrics", BaseTextEnv.aggregate_metrics)
    try:
        figures = aggregate(rows) if rows else {}
    except Exception as error:  # it is a user's; a figure must not end a run
        print(f"note: environment {env_class}: aggregate_metrics failed: {error!r}")
        figures = {}
    return {
        str(key): float(value) for key, value in figures.items() if isinstance(value, int | float | np.number)
    }
