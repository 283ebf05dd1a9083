"""What became of a batch's episodes: failures that stop a run, each environment's figures, what a score loses
for searches and for nearing a limit of length.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config import Config
from verl.environments.base import BaseTextEnv
from verl.environments.registry import SEARCH, load_class
from verl.protocol import DataProto
from verl.trainer.ppo.run_state import EnvironmentsFailed, SearchesFailed

Records = Sequence[Mapping[str, Any]] | np.ndarray


def environment_of(record: Mapping[str, Any]) -> str:
    return record.get("env_class", SEARCH)


class FailureWatch:
    """Looks at each generation for episodes that ended for another reason than the policy's."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        """say: takes one line for the user: the first failure of each environment, and one of a generation in
        which all its episodes have failed.
        """
        self.config = config
        self.say = say
        self._told = set[str]()

    def check(self, records: Records) -> None:
        """SearchesFailed, EnvironmentsFailed: so many failed that the rest says little about the policy. It
        leans to trajectories that did not search, or ended before a server went away.
        """
        searches = [record for record in records if record["finish_reason"] == "search_failed"]
        others = [record for record in records if record["finish_reason"] in ("env_failed", "unverified")]
        failed_in = Counter(map(environment_of, others))
        in_all = Counter(map(environment_of, records)) if others else {}
        for name, number in failed_in.items():
            if name not in self._told or number == in_all[name]:
                self._told.add(name)
                error = _error_of(next(record for record in others if environment_of(record) == name))
                how_many = f"an episode failed and is left out ({number} of {in_all[name]})"
                self.say(f"environment {name}: {how_many}: {error}")
        names = ", ".join(sorted(failed_in))
        for block, failed, who, stop in (
            ("retriever", searches, "a search", SearchesFailed),
            ("environment", others, names, EnvironmentsFailed),
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
    """`env/<environment>/..` (docs/metrics.md) of a batch in which other environments than searches are.
    scores: of each record; None: it failed or could not be verified. A ":" in a name is a "." here.
    """
    metrics: dict[str, float] = {}
    names = dict.fromkeys(map(environment_of, records))
    for name in names if set(names) - {SEARCH} else ():
        rows = [record for record in records if environment_of(record) == name]
        of_all = zip(records, scores, strict=True)
        known = [score for record, score in of_all if environment_of(record) == name and score is not None]
        reasons = [row["finish_reason"] for row in rows]
        turns = [len(row["turns"]) for row in rows]
        figures: dict[str, Any] = {"turns": np.mean(turns), "failed": reasons.count("env_failed")}
        figures["unverified"] = reasons.count("unverified")
        if known:
            figures["reward"] = np.mean(known)
        if name != SEARCH:
            figures["steps_failed"] = sum(bool(row["env_error"] and row["turns"]) for row in rows)
            figures["seconds_init"] = np.mean([row["env_seconds_init"] for row in rows])
            figures["seconds_step"] = sum(row["env_seconds_step"] for row in rows) / max(sum(turns), 1)
            aggregate = getattr(load_class(name)[0], "aggregate_metrics", BaseTextEnv.aggregate_metrics)
            own = [row["env_metrics"] for row in rows if row["env_metrics"]]
            try:
                figures |= {str(key): value for key, value in (aggregate(own) if own else {}).items()}
            except Exception as error:  # it is a user's; a figure must not end a run
                print(f"note: environment {name}: aggregate_metrics failed: {error!r}")
        metrics |= {
            f"env/{name.replace(':', '.')}/{key}": float(value)
            for key, value in figures.items()
            if isinstance(value, int | float | np.number)
        }
    return metrics


def apply_search_cost(scores: Tensor, num_searches: Sequence[int], cost: float) -> Tensor:
    """Scores [N, R] float32 that are worth less the more searches each row has made: score * max(0, 1 - cost
    * searches) if score > 0.

    A reward of 0 or less stays what it is, so that a wrong answer is never a reason to search less. Among
    right answers to one question the cost decides: GRPO then prefers the one with no search too many.
    """
    searches = torch.tensor(num_searches, dtype=scores.dtype)
    kept = (1.0 - cost * searches).clamp(min=0.0).unsqueeze(1)
    return torch.where(scores > 0, scores * kept, scores)


def room_left(batch: DataProto, max_context: int, max_turn: int, max_turns: int) -> np.ndarray:
    """How many more tokens each policy could have written before a limit had cut it; [N] int64, at least 0.

    A trajectory is cut when its context (prompt, turns, observations) reaches `max_context` tokens, or when
    its last turn, the one after `max_turns` others, reaches `max_turn`. 0 for one that was cut, also where an
    observation that did not fit has cut it. Of other environments than searches any turn may be the last.
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
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13) times `factor`; [N] float64.

    0 while at least `buffer_length` tokens are left, then falling evenly to -1 where none is: with |y| the
    length, L_max where it is cut and L_cache the buffer, (L_max - L_cache - |y|) / L_cache. The room that is
    left, L_max - |y|, counts, as an agent's context holds retrieved text as well.
    """
    return factor * np.clip((room - buffer_length) / buffer_length, -1.0, 0.0)


def add_to_outcome(scores: Tensor, response_mask: Tensor, amounts: np.ndarray) -> Tensor:
    """[N, R]: `scores` with each row's amount [N] added on its last sampled token, if it has one."""
    mask = response_mask.bool()
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return scores + is_last * torch.from_numpy(amounts).to(scores.dtype).unsqueeze(1)
