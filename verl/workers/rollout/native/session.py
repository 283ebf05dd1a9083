"""One trajectory inside the engine, and the table of per-slot numbers that a decode step reads as arrays."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from verl.workers.rollout.engine import Completion, SamplingParams
from verl.workers.rollout.native.sampler import SamplingRows, uniforms

NO_SLOT = -1


class State(enum.Enum):
    """Where a session stands; the drawing is in `verl/workers/rollout/engine.py`."""

    QUEUED = "queued"  # has no slot yet
    READY = "ready"  # has a slot, and new tokens to prefill
    RUNNING = "running"  # one token per step
    WAITING = "waiting"  # its turn ended; keeps its slot until resume or close


@dataclass(eq=False)
class Session:
    """A trajectory: what is still to be prefilled, and the turn that is being sampled.

    Attributes:
        pending: tokens not yet in the cache: the prompt, or the last sampled token and an observation.
        kv_len: positions in the cache.
        context_len: all tokens so far, sampled ones and `pending` included.
        num_sampled: tokens sampled over all turns; numbers the random draws.
        ends: token ids that need a look: end of sequence, or able to complete a stop string.
    """

    session_id: int
    params: SamplingParams
    pending: list[int]
    state: State = State.QUEUED
    slot: int = NO_SLOT
    kv_len: int = 0
    context_len: int = 0
    num_sampled: int = 0
    ends: frozenset[int] = frozenset()
    limit: int = 0  # tokens this turn may still have in all
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_first: int = 0

    def begin_turn(self, params: SamplingParams, pending: list[int], max_model_len: int) -> None:
        """Set up a turn that starts after `pending` (which replaces what was pending)."""
        self.params = params
        self.pending = pending
        self.token_ids, self.log_probs = [], []
        self.context_len = self.kv_len + len(pending)
        self.limit = min(params.max_tokens, max_model_len - self.context_len)
        eos: frozenset[int] = frozenset() if params.ignore_eos else params.eos_token_ids
        self.ends = eos | (params.stop.candidate_ids if params.stop else frozenset())

    def accept(self, token_id: int, log_prob: float) -> tuple[str, str | None] | None:
        """Take a sampled token; (finish reason, stop string) if it ends the turn."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        if token_id in self.ends:
            stop_string = self.params.stop.match(self.token_ids) if self.params.stop else None
            if stop_string is not None:
                return "stop", stop_string
            if token_id in self.params.eos_token_ids and not self.params.ignore_eos:
                return "eos", None
        return ("length", None) if len(self.token_ids) >= self.limit else None

    def completion(self, reason: str, stop_string: str | None, version: int) -> Completion:
        """The turn as it is handed to the owner."""
        return Completion(
            session_id=self.session_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            stop_string=stop_string,
            version_first=self.version_first,
            version_last=version,
        )


class SlotTable:
    """Per-slot numbers of the running turn, as numpy arrays of length num_slots.

    `last_token` is the token to feed next, `kv_len` its position; `counter` numbers the next random draw.
    """

    def __init__(self, num_slots: int) -> None:
        self.last_token = np.zeros(num_slots, dtype=np.int64)
        self.kv_len = np.zeros(num_slots, dtype=np.int64)
        self.counter = np.zeros(num_slots, dtype=np.uint64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._temperature = np.ones(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots)
        self._min_p = np.zeros(num_slots)

    def begin_turn(self, session: Session) -> None:
        """Copy the turn's parameters into the session's slot."""
        slot, params = session.slot, session.params
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
