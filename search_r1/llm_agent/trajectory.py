"""A trajectory while it grows, the record that is kept of it, the tensors and the metrics made from many.

    prompt | policy's tokens | observation | policy's tokens | ...      response = all after the prompt
             mask 1 ... 1      0 ... 0       1 ... 1

Token ids are only ever appended, as they were sampled or tokenised: nothing is decoded and encoded again.
A trajectory that is kept for the next step travels as its row of the batch and its record (see
`continuations` of verl/trainer/ppo/collection.py); `Trajectory.continued` makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from search_r1.search.client import FoundDocument
from verl.utils.reward_score.qa_em import join_turns
from verl.workers.rollout.base import Partial

KEPT = "kept"  # finish_reason of a trajectory that goes on in the next step


@dataclass
class Turn:
    """One generation of the policy and what came back.

    `action`: "search" | "answer" | "invalid" (the policy got a hint) | "none" (the last turn had no action).
    Spans are positions in the response, end exclusive; the obs span is None when nothing was appended.
    """

    action: str
    text: str
    query: str | None
    start: int
    end: int
    documents: list[FoundDocument] | None = None  # None: no search was made
    error: str | None = None  # why the search failed
    obs_start: int | None = None
    obs_end: int | None = None
    search_seconds: float | None = None  # from asking until the documents were there


@dataclass
class Trajectory:
    """Row `row` of a batch. The three response lists have one entry per response token.

    Example after "a <search> b </search>" and its observation, with ids for words:
    response_ids [5, 6, 7, 6, 9, 9, 9], response_mask [1, 1, 1, 1, 0, 0, 0],
    log_probs [-.1, -.3, -2., -.1, 0, 0, 0].
    """

    row: int
    prompt_ids: list[int]
    seed: int
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # "answer" | "eos" | "length" | "max_turns" | "search_failed" | "cut" | "kept"; "" while it runs
    finish_reason: str = ""
    version_first: int | None = None  # policy version of the first and of the last sampled token
    version_last: int | None = None
    num_begun: int = 0  # of the last response tokens: of a turn that has not ended
    num_old_turns: int | None = None  # turns of an earlier step; None: begun in this one

    @classmethod
    def continued(cls, row: int, prompt_ids: list[int], seed: int, state: Mapping[str, Any]) -> Trajectory:
        """One of an earlier step as it was, finished or to be gone on with.

        Args:
            state: its `response_ids`, `response_mask`, `log_probs` without padding, and its `record`.
        """
        record = state["record"]
        turns = [Turn(**turn) for turn in record["turns"]]
        is_open = record["finish_reason"] == KEPT
        return cls(
            row,
            prompt_ids,
            seed,
            list(state["response_ids"]),
            list(state["response_mask"]),
            list(state["log_probs"]),
            turns,
            "" if is_open else record["finish_reason"],
            record["version_first"],
            record["version_last"],
            record["num_begun"],
            len(turns),
        )

    @property
    def num_tokens(self) -> int:
        """Length of the whole context, prompt included."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def query_to_ask(self) -> str | None:
        """The query of a trajectory that was kept while it waited for its documents."""
        turn = self.turns[-1] if self.turns else None
        return turn.query if turn is not None and turn.obs_start is None and not self.num_begun else None

    def add_sampled(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> tuple[int, int]:
        """Appends what the policy sampled to the end of its turn; returns the turn's span in the response."""
        start = len(self.response_ids) - self.num_begun
        self.num_begun = 0
        self.response_ids += token_ids
        self.response_mask += [1] * len(token_ids)
        self.log_probs += log_probs
        return start, len(self.response_ids)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample, and notes their span in the last turn."""
        turn = self.turns[-1]
        turn.obs_start = len(self.response_ids)
        self.response_ids += token_ids
        self.response_mask += [0] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        turn.obs_end = len(self.response_ids)

    def mask(self) -> None:
        """None of its tokens may be learnt from."""
        self.response_mask = [0] * len(self.response_ids)
        self.log_probs = [0.0] * len(self.response_ids)

    def keep(self, begun: Partial, version: int) -> None:
        """Takes what the running turn has sampled, for a later step to go on from. `version`: the present."""
        if begun.token_ids:
            start, end = self.add_sampled(begun.token_ids, begun.log_probs)
            self.num_begun = end - start
            self.version_first = begun.version_first if self.version_first is None else self.version_first
            self.version_last = version

    def record(self, prompt_text: str) -> dict[str, Any]:
        """The plain dict that goes into the batch under `trajectory`."""
        return {
            "turns": [dict(vars(turn)) for turn in self.turns],
            "num_searches": sum(turn.documents is not None for turn in self.turns),
            "num_actions": len(self.turns),
            "num_valid_actions": sum(turn.action in ("search", "answer") for turn in self.turns),
            "finish_reason": self.finish_reason,
            "version_first": self.version_first,
            "version_last": self.version_last,
            "num_begun": self.num_begun,
            "prompt_text": prompt_text,
            "policy_text": join_turns(turn.text for turn in self.turns),
        }


def to_tensors(
    trajectories: Sequence[Trajectory], prompt_width: int, response_width: int, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """The batch's tensors, by the table in `verl/protocol.py`: P = prompt_width, R = response_width.

    The masks are made from lengths: the pad token may be any id, the end-of-sequence token too.
    """
    num_rows = len(trajectories)
    input_ids = np.full((num_rows, prompt_width + response_width), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    response_mask = np.zeros((num_rows, response_width), dtype=np.int64)
    log_probs = np.zeros((num_rows, response_width), dtype=np.float32)
    for row, trajectory in enumerate(trajectories):
        start, length = prompt_width - len(trajectory.prompt_ids), len(trajectory.response_ids)
        input_ids[row, start:prompt_width] = trajectory.prompt_ids
        input_ids[row, prompt_width : prompt_width + length] = trajectory.response_ids
        attention_mask[row, start : prompt_width + length] = 1
        response_mask[row, :length] = trajectory.response_mask
        log_probs[row, :length] = trajectory.log_probs
    position_ids = np.maximum(attention_mask.cumsum(axis=1) - 1, 0) * attention_mask
    return {
        "prompts": torch.from_numpy(input_ids[:, :prompt_width].copy()),
        "responses": torch.from_numpy(input_ids[:, prompt_width:].copy()),
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "position_ids": torch.from_numpy(position_ids),
        "response_mask": torch.from_numpy(response_mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }


def env_metrics(trajectories: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Search-R1's `env/*` figures of a batch from its trajectory records, and how many searches failed.

    An action is one generation. Finished are those that answered. A search that the last turn still asked
    for counts as valid, though it was not made. All are means over trajectories but `env/search_failed`,
    a count. Raises ValueError for no trajectories.
    """
    if not trajectories:
        raise ValueError("env_metrics needs at least one trajectory")
    actions = np.array([record["num_actions"] for record in trajectories])
    valid = np.array([record["num_valid_actions"] for record in trajectories])
    searches = [sum(turn["action"] == "search" for turn in record["turns"]) for record in trajectories]
    reasons = [record["finish_reason"] for record in trajectories]
    return {
        "env/number_of_actions/mean": float(actions.mean()),
        "env/number_of_actions/max": float(actions.max()),
        "env/number_of_actions/min": float(actions.min()),
        "env/finish_ratio": float(np.mean([reason == "answer" for reason in reasons])),
        "env/number_of_valid_action": float(valid.mean()),
        "env/ratio_of_valid_action": float((valid / np.maximum(actions, 1)).mean()),
        "env/number_of_valid_search": float(np.mean(searches)),
        "env/search_failed": float(reasons.count("search_failed")),
    }


def search_metrics(
    before: Mapping[str, float], after: Mapping[str, float], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """`retrieval/*` of one batch from the search client's counters (`SearchClient.statistics`) around it.

    searches, and of these cache_hits and shared (an equal one was under way); requests (HTTP) that brought an
    answer, their mean seconds, failed_requests; failovers (searches answered by another server than was asked
    first). wait_seconds/*: from a trajectory's query to its documents. {} for a client without counters.
    """
    counts = {name: after[name] - before[name] for name in after}
    if not counts:
        return {}
    seconds = counts.pop("request_seconds")
    del counts["failed"]  # env/search_failed has it
    turns = [turn for t in trajectories for turn in t.turns[t.num_old_turns :]]
    waits = [turn.search_seconds for turn in turns if turn.search_seconds is not None]
    metrics = counts | {
        "request_seconds/mean": seconds / max(1, counts["requests"]),
        "wait_seconds/mean": float(np.mean(waits)) if waits else 0.0,
        "wait_seconds/max": max(waits, default=0.0),
    }
    return {f"retrieval/{name}": float(value) for name, value in metrics.items()}
