"""One trajectory inside the engine, and the table of per-slot numbers that a decode step reads as arrays.

A session keeps all its token ids, so its KV state can be dropped and computed again at any time. What the
scheduler needs of every running session in every step lies in `SlotTable`, one row per running session.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.workers.rollout.engine import Completion, Partial, SamplingParams
from verl.workers.rollout.native.sampler import SamplingRows, uniforms

NO_SLOT = -1


class State(enum.Enum):
    """Where a session stands; the drawing is in `verl/workers/rollout/engine.py`."""

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


class SlotTable:
    """Per-slot numbers of the running sessions, as numpy arrays with a row for each slot.

    Attributes:
        last_token: int64, the token to feed next; kv_len: int64, its position.
        room: int64, positions that the slot's blocks have; blocks: int32 [slots, most blocks], 0 beyond them.
        counter: uint64, numbers the next random draw.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.last_token = np.zeros(num_slots, dtype=np.int64)
        self.kv_len = np.zeros(num_slots, dtype=np.int64)
        self.room = np.zeros(num_slots, dtype=np.int64)
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.counter = np.zeros(num_slots, dtype=np.uint64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._temperature = np.ones(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots)
        self._min_p = np.zeros(num_slots)

    def load(self, session: Session, block_size: int) -> None:
        """Fill the session's slot from what it has."""
        slot, params = session.slot, session.params
        self.last_token[slot] = session.tokens[-1]
        self.kv_len[slot] = session.kv_len
        self.room[slot] = len(session.blocks) * block_size
        self.blocks[slot] = 0
        self.blocks[slot, : len(session.blocks)] = session.blocks
        self.counter[slot] = session.num_sampled
        self._seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self._temperature[slot] = params.temperature
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """What the sampler needs for these slots; each call draws the next number of each slot."""
        uniform = uniforms(self._seed[slots], self.counter[slots])
        self.counter[slots] += np.uint64(1)
        return SamplingRows(
            self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots], uniform
        )
