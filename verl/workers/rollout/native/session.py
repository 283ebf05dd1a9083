"""One trajectory inside the engine, and the table of numbers that a decode step reads as arrays.

A session keeps all its token ids, so its KV state can be dropped and computed again at any time. What the
scheduler needs of every running session in every step lies in `SlotTable`, a row per running session.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.workers.rollout.base import Completion, Partial, SamplingParams
from verl.workers.rollout.native.sampler import SamplingRows, uniforms

NO_SLOT = -1


class State(enum.Enum):
    """Where a session stands; the drawing is in `verl/workers/rollout/base.py`."""

    QUEUED = "queued"  # has tokens to compute, and no slot: new, resumed or preempted
    RUNNING = "running"  # has a slot: prefilled in this step or chunk by chunk, then one token per step
    PARKED = "parked"  # its turn ended; no slot, but blocks until someone needs them


@dataclass(eq=False)
class Session:
    """A trajectory: its tokens, the KV state it holds, and the turn that is being sampled.

    Attributes:
        tokens: int32, all so far: prompt, sampled tokens, observations. The last one is never computed yet.
        prompt_len: tokens of the first prompt, which other sessions may have too.
        blocks: its KV blocks in order of position; empty if it holds no KV state.
        kv_len: positions that are computed; not kept up while it decodes (then it is len(tokens) - 1).
        contents: content numbers of the first blocks, as many as are published.
        num_sampled: tokens sampled over all turns; numbers the random draws.
        ends: token ids that need a look: end of sequence, or able to complete a stop string.
        turn_start: where in `tokens` this turn's sampled ones begin.
        limit: most tokens this turn may have.
    """

    session_id: int
    params: SamplingParams
    tokens: array[int] = field(default_factory=lambda: array("i"))
    prompt_len: int = 0
    state: State = State.QUEUED
    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    contents: list[int] = field(default_factory=list)
    num_sampled: int = 0
    ends: frozenset[int] = frozenset()
    turn_start: int = 0
    limit: int = 0
    log_probs: list[float] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    version_first: int | None = None

    def begin_turn(self, params: SamplingParams, new_tokens: Sequence[int], max_model_len: int) -> None:
        """Append a prompt or an observation and set up the turn that follows it."""
        self.params = params
        self.tokens.extend(new_tokens)
        self.turn_start = len(self.tokens)
        self.limit = min(params.max_tokens, max_model_len - self.turn_start)
        self.log_probs, self.model_log_probs, self.version_first = [], [], None
        eos: frozenset[int] = frozenset() if params.ignore_eos else params.eos_token_ids
        self.ends = eos | (params.stop.candidate_ids if params.stop else frozenset())
        self.state = State.QUEUED

    def forget_kv(self) -> None:
        """What it has is computed anew when it runs again."""
        self.blocks, self.contents, self.kv_len = [], [], 0

    def accept(
        self, token_id: int, log_prob: float, model_log_prob: float, version: int
    ) -> tuple[str, str | None] | None:
        """Take a sampled token; (finish reason, stop string) if it ends the turn."""
        if self.version_first is None:
            self.version_first = version
        self.tokens.append(token_id)
        self.log_probs.append(log_prob)
        self.model_log_probs.append(model_log_prob)
        self.num_sampled += 1
        if token_id in self.ends:
            stop_string = self.params.stop.match(self.tokens[self.turn_start :]) if self.params.stop else None
            if stop_string is not None:
                return "stop", stop_string
            if token_id in self.params.eos_token_ids and not self.params.ignore_eos:
                return "eos", None
        return ("length", None) if len(self.log_probs) >= self.limit else None

    def completion(self, reason: str, stop_string: str | None, version: int) -> Completion:
        """The turn as it is handed to the owner; `version` is that of its last token."""
        return Completion(
            session_id=self.session_id,
            token_ids=self.tokens[self.turn_start :].tolist(),
            log_probs=self.log_probs,
            model_log_probs=self.model_log_probs,
            finish_reason=reason,
            stop_string=stop_string,
            version_first=version if self.version_first is None else self.version_first,
            version_last=version,
        )

    def partial(self) -> Partial:
        """The turn under way; nothing if there is none."""
        if self.state is State.PARKED:
            return Partial([], [], None)
        return Partial(self.tokens[self.turn_start :].tolist(), list(self.log_probs), self.version_first)


_COLUMNS = [
    ("last_token", np.int64),  # the token to feed next
    ("kv_len", np.int64),  # its position
    ("room", np.int64),  # positions that the slot's blocks have
    ("counter", np.uint64),  # numbers the next random draw
    ("seed", np.uint64),
    ("temperature", np.float64),
    ("top_k", np.int64),
    ("top_p", np.float64),
    ("min_p", np.float64),
]


class SlotTable:
    """Numbers of the running sessions, a row for each slot.

    Attributes:
        rows: numpy record array [slots] with the fields of `_COLUMNS`.
        blocks: int32 [slots, most blocks], 0 beyond a session's own.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.rows = np.zeros(num_slots, dtype=_COLUMNS)
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)

    def load(self, session: Session, block_size: int) -> None:
        """Fill the session's slot from what it has."""
        params = session.params
        self.rows[session.slot] = (
            session.tokens[-1],
            session.kv_len,
            len(session.blocks) * block_size,
            session.num_sampled,
            params.seed & 0xFFFFFFFFFFFFFFFF,
            params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
        )
        self.blocks[session.slot] = 0
        self.blocks[session.slot, : len(session.blocks)] = session.blocks

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """What the sampler needs for these slots; each call draws the next number of each slot."""
        rows = self.rows[slots]
        self.rows["counter"][slots] += np.uint64(1)
        choices = {
            name: np.ascontiguousarray(rows[name]) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return SamplingRows(**choices, uniform=uniforms(rows["seed"], rows["counter"]))
