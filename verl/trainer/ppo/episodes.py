"""The outcomes of a batch's episodes.

These are failures that stop a run, the figures of each environment, and what a score loses for searches and
for nearing a limit of length.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.checkpoints.run_state import EnvironmentsFailed, SearchesFailed
from verl.config import Config
from verl.environments.environment import BaseTextEnv
from verl.environments.registry import SEARCH, load_class
from verl.protocol import DataProto

Records = Sequence[Mapping[str, Any]] | np.ndarray


def environment_of(record: Mapping[str, Any]) -> str:
    return record.get("env_class", SEARCH)


class FailureWatch:
    """A check of each generation for episodes that ended for another reason than the policy's.

    Args:
        config: the whole configuration.
        say: takes one line for the user: about the first failure of each environment, and about one of a
            generation in which all its episodes have failed.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.config = config
        self.say = say
        self._told = set[str]()

    def check(self, records: Records) -> None:
        """Raise SearchesFailed or EnvironmentsFailed if so many episodes failed that the rest says little.

        The rest leans to trajectories that did not search, or that ended before a server went away.
        """
        searches = [record for record in records if record["finish_reason"] == "search_failed"]
        other_failures = [
            record for record in records if record["finish_reason"] in ("env_failed", "unverified")
        ]
        failed_in = Counter(map(environment_of, other_failures))
        in_all = Counter(map(environment_of, records)) if other_failures else {}
        for name, number in failed_in.items():
            if name not in self._told or number == in_all[name]:
                self._told.add(name)
                error = _error_of(next(record for record in other_failures if environment_of(record) == name))
                how_many = f"an episode failed and is left out ({number} of {in_all[name]})"
                self.say(f"environment {name}: {how_many}: {error}")
        names = ", ".join(sorted(failed_in))
        for block, failed, who, stop in (
            ("retriever", searches, "a search", SearchesFailed),
            ("environment", other_failures, names, EnvironmentsFailed),
        ):
            limit = self.config[block].max_failed_share
            if failed and (len(failed) > limit * len(records) or len(failed) == len(records)):
                raise stop(
                    f"{len(failed)} of {len(records)} trajectories ended because {who} failed "
                    f"({block}.max_failed_share={limit:g}): {_error_of(failed[-1])}"
                )


def _error_of(record: Mapping[str, Any]) -> str:
    errors = [turn["error"] for turn in record["turns"] if turn.get("error")]
    return record.get("env_error") or (errors[0] if errors else "unknown")


def environment_metrics(records: Records, scores: Sequence[float | None]) -> dict[str, float]:
    """Return `env/<environment>/..` (docs/metrics.md) of a batch with other environments than searches.

    A ":" in a name is a "." here. For a batch of searches alone there are no such metrics.

    Args:
        records: the records of trajectories.
        scores: the score of each record; None if it failed or could not be verified.
    """
    metrics: dict[str, float] = {}
    names = dict.fromkeys(map(environment_of, records))
    for name in names if set(names) - {SEARCH} else ():
        rows = [record for record in records if environment_of(record) == name]
        scored_records = zip(records, scores, strict=True)
        known_scores = [
            score for record, score in scored_records if environment_of(record) == name and score is not None
        ]
        reasons = [row["finish_reason"] for row in rows]
        turns = [len(row["turns"]) for row in rows]
        figures: dict[str, Any] = {"turns": np.mean(turns), "failed": reasons.count("env_failed")}
        figures["unverified"] = reasons.count("unverified")
        if known_scores:
            figures["reward"] = np.mean(known_scores)
        if name != SEARCH:
            figures["steps_failed"] = sum(bool(row["env_error"] and row["turns"]) for row in rows)
            figures["seconds_init"] = np.mean([row["env_seconds_init"] for row in rows])
            figures["seconds_step"] = sum(row["env_seconds_step"] for row in rows) / max(sum(turns), 1)
            aggregate = getattr(load_class(name)[0], "aggregate_metrics", BaseTextEnv.aggregate_metrics)
            env_metrics = [row["env_metrics"] for row in rows if row["env_metrics"]]
            try:
                figures |= {
                    str(key): value for key, value in (aggregate(env_metrics) if env_metrics else {}).items()
                }
            except Exception as error:  # the code is the user's, and a figure must not end a run
                print(f"note: environment {name}: aggregate_metrics failed: {error!r}")
        metrics |= {
            f"env/{name.replace(':', '.')}/{key}": float(value)
            for key, value in figures.items()
            if isinstance(value, int | float | np.number)
        }
    return metrics


def apply_search_cost(scores: Tensor, num_searches: Sequence[int], cost: float) -> Tensor:
    """Return scores that are worth less the more searches each row has made, [N, R] float32.

    A positive score becomes score * max(0, 1 - cost * searches). A reward of 0 or less stays what it is, so
    that a wrong answer is never a reason to search less. Among right answers to one question the cost
    decides: GRPO then prefers the one with no search too many.
    """
    searches = torch.tensor(num_searches, dtype=scores.dtype)
    factor = (1.0 - cost * searches).clamp(min=0.0).unsqueeze(1)
    return torch.where(scores > 0, scores * factor, scores)


def room_left(batch: DataProto, max_context: int, max_turn: int, max_turns: int) -> np.ndarray:
    """Return how many more tokens could have been written before a limit cut each row, [N] int64.

    A trajectory is cut when its context (prompt, turns, observations) reaches `max_context` tokens, or when
    its last turn, the one after `max_turns` others, reaches `max_turn`. In other environments than searches
    any turn may be the last. The room is at least 0. It is 0 for a trajectory that was cut, also if an
    observation that did not fit has cut it.
    """
    context = batch.tensors["attention_mask"].sum(-1).tolist()
    room = np.maximum(max_context - np.array(context, dtype=np.int64), 0)
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        turns = record["turns"]
        if record["finish_reason"] == "length":
            room[row] = 0
        elif len(turns) > max_turns or (turns and "env_class" in record):
            room[row] = min(room[row], max(max_turn - (turns[-1]["end"] - turns[-1]["start"]), 0))
    return room


def overlong_penalty(room: np.ndarray, buffer_length: int, factor: float) -> np.ndarray:
    """Return the soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13) times `factor`, [N] float64.

    The punishment is 0 while at least `buffer_length` tokens are left, and then falls evenly to -1 where none
    is left:

        (L_max - L_cache - |y|) / L_cache

    |y| is the length, L_max the length at which it is cut, and L_cache the buffer. Here the room that is
    left, L_max - |y|, counts, since an agent's context holds retrieved text as well.
    """
    return factor * np.clip((room - buffer_length) / buffer_length, -1.0, 0.0)


def add_to_outcome(scores: Tensor, response_mask: Tensor, amounts: np.ndarray) -> Tensor:
    """Return `scores` [N, R] with each row's amount [N] added on its last sampled token, if it has one."""
    mask = response_mask.bool()
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return scores + is_last * torch.from_numpy(amounts).to(scores.dtype).unsqueeze(1)
