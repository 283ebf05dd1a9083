"""A rollout engine for any Hugging Face causal LM: the model's own forward pass, one sequence at a time.

For models that the native engine does not run. It keeps the same promises (engine.py) by the
plainest means: each session has the cache that the model itself returns, and at most `max_num_seqs` sessions
hold one. Who needs a cache takes the place of the session that has been parked longest; what was dropped is
computed again from the session's tokens.

    queue -- a place is free, or a parked session gives its up --> active: one token per step
      ^                                                               |
      +-- resume, cache dropped -- parked <----- turn ended ----------+   (resume, cache kept: active at once)
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.workers.rollout.engine import Completion, Partial, SamplingParams, checked_prompt, checked_tokens
from verl.workers.rollout.native.sampler import SamplingRows, draw, uniforms
from verl.workers.rollout.transformers_model import CausalModel, HeldCache

logger = logging.getLogger(__name__)
_COUNTS = ("steps", "generated_tokens", "prefilled_tokens")


class _State(enum.Enum):
    QUEUED = "queued"  # its turn is under way, without a place
    ACTIVE = "active"  # one token per step
    PARKED = "parked"  # its turn ended; may hold a cache


@dataclass(eq=False)
class _Session:
    """A trajectory. `token_ids[turn_start:]` are sampled in the present turn; `cache` holds `num_cached`."""

    session_id: int
    params: SamplingParams
    token_ids: list[int]
    state: _State = _State.QUEUED
    cache: HeldCache | None = None
    num_cached: int = 0
    num_sampled: int = 0  # over all turns; numbers the random draws
    turn_start: int = 0
    limit: int = 0  # tokens this turn may have in all
    parked_at: int = 0
    version_first: int | None = None
    log_probs: list[float] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)

    def begin_turn(self, params: SamplingParams, max_model_len: int) -> None:
        self.params = params
        self.turn_start = len(self.token_ids)
        self.limit = min(params.max_tokens, max_model_len - len(self.token_ids))
        self.log_probs, self.model_log_probs, self.version_first = [], [], None

    def drop_cache(self) -> None:
        self.cache, self.num_cached = None, 0

    def finish(self) -> tuple[str, str | None] | None:
        """(finish reason, stop string) if the turn has come to its end."""
        params, sampled = self.params, self.token_ids[self.turn_start :]
        stop_string = params.stop.match(sampled) if params.stop else None
        if stop_string is not None:
            return "stop", stop_string
        if sampled and sampled[-1] in params.eos_token_ids and not params.ignore_eos:
            return "eos", None
        return ("length", None) if len(sampled) >= self.limit else None


class TransformersEngine:
    """A `RolloutEngine` (see `verl/workers/rollout/engine.py`) on the Hugging Face model itself.

    Weights are references to the tensors given to `update_weights` where dtype and device agree. If the owner
    changes them in place, call `update_weights` again before the next step.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        trust_remote_code: bool = False,
    ) -> None:
        """Args: max_num_seqs: sessions that hold a cache at a time; max_model_len: tokens of one session."""
        if max_num_seqs < 1 or max_model_len < 2:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs} and max_model_len {max_model_len}; expected at least 1 and 2"
            )
        self.max_model_len = max_model_len
        self.version = -1
        self._device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0", as tensors name it
        self._model = CausalModel(model_config, dtype, self._device, trust_remote_code)
        self._max_num_seqs = max_num_seqs
        self._asleep = False
        self._next_id = 0
        self._clock = 0  # turns ended so far, to tell who has been parked longest
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._seconds = 0.0
        self._sessions: dict[int, _Session] = {}
        self._queue: deque[_Session] = deque()
        self._active: list[_Session] = []
        logger.warning(
            "rollout of model_type %r runs on transformers' own %s, a sequence at a time (slow): the native "
            "engine does not run this model",
            model_config.model_type,
            self._model.name,
        )

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        """True if a turn is under way."""
        return bool(self._active or self._queue)

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt. ValueError if it is empty, has unknown ids, or leaves no room to generate."""
        tokens = checked_prompt(token_ids, self._model.vocab_size, self.max_model_len)
        session = _Session(self._next_id, params, tokens)
        self._next_id += 1
        session.begin_turn(params, self.max_model_len)
        self._sessions[session.session_id] = session
        self._queue.append(session)
        return session.session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens (none is fine) and sample another turn.

        If they leave no room within max_model_len, the next `step` returns an empty completion with "length".
        """
        session = self._session(session_id)
        if session.state is not _State.PARKED:
            raise ValueError(
                f"session {session_id} is {session.state.value}; only one whose turn ended can be resumed"
            )
        session.token_ids.extend(checked_tokens(token_ids, self._model.vocab_size))
        session.begin_turn(params, self.max_model_len)
        if session.cache is not None:
            session.state = _State.ACTIVE
            self._active.append(session)
        else:
            session.state = _State.QUEUED
            self._queue.append(session)

    def close(self, session_id: int) -> None:
        """Forget a session, in whatever state it is."""
        self._leave(self._session(session_id))
        del self._sessions[session_id]

    def partial(self, session_id: int) -> Partial:
        """What the present turn has sampled so far; nothing while no turn is under way."""
        session = self._session(session_id)
        if session.state is _State.PARKED:
            return Partial([], [], None)
        sampled = session.token_ids[session.turn_start :]
        return Partial(sampled, list(session.log_probs), session.version_first)

    # ---- one step ----

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One token for each active session; return the turns that ended.

        If the model raises, all caches are dropped and the sessions stay as they were before the step.
        """
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake before step")
        if not self.has_runnable:
            return []
        if not self._model.loaded:
            raise RuntimeError("the engine has no weights; call update_weights first")
        start = time.perf_counter()
        full = [session for session in (*self._active, *self._queue) if session.limit < 1]
        self._admit()
        running = [session for session in self._active if session.limit > 0]
        ended = self._book(running, self._sample(running)) if running else []
        ended += [self._end(session, "length", None) for session in full]
        self._counts["steps"] += 1
        self._seconds += time.perf_counter() - start
        return ended

    def _admit(self) -> None:
        """Give places to the queue, in its order; who has been parked longest gives a place up."""
        parked = sorted(
            (x for x in self._sessions.values() if x.state is _State.PARKED and x.cache is not None),
            key=lambda session: -session.parked_at,
        )
        while self._queue and len(self._active) < self._max_num_seqs:
            if len(self._active) + len(parked) >= self._max_num_seqs:
                parked.pop().drop_cache()
            session = self._queue.popleft()
            session.state = _State.ACTIVE
            self._active.append(session)

    def _logits(self, session: _Session) -> Tensor:
        advanced = self._model.advance(session.token_ids, session.num_cached, session.cache)
        if advanced.num_computed > 1 or session.cache is None:
            self._counts["prefilled_tokens"] += advanced.num_computed
        session.cache = advanced.cache
        session.num_cached = len(session.token_ids) if advanced.cache is not None else 0
        return advanced.logits

    def _sample(self, running: list[_Session]) -> list[list[float]]:
        """Token ids, log-probs and the plain model's log-probs of one new token each."""
        try:
            logits_AV = torch.stack([self._logits(session) for session in running])
            drawn = draw(logits_AV, _sampling_rows(running))
            on_host = torch.stack([x.to(torch.float64) for x in drawn]).cpu()
            if not bool(torch.isfinite(on_host).all()):
                raise RuntimeError(
                    f"sampling met a log-prob that is not finite: weights version {self.version} hold or "
                    "produce NaN or infinity"
                )
        except BaseException:  # whatever it was, also Ctrl-C: what the caches hold is not known any more
            self._drop_caches()
            raise
        return on_host.tolist()

    def _book(self, running: list[_Session], drawn: list[list[float]]) -> list[Completion]:
        """Append the step's tokens; the turns that they end."""
        self._counts["generated_tokens"] += len(running)
        ended = []
        for session, token, log_prob, model_log_prob in zip(running, *drawn, strict=True):
            session.token_ids.append(int(token))
            session.log_probs.append(log_prob)
            session.model_log_probs.append(model_log_prob)
            session.num_sampled += 1
            if session.version_first is None:
                session.version_first = self.version
            finish = session.finish()
            if finish is not None:
                ended.append(self._end(session, *finish))
        return ended

    def _end(self, session: _Session, reason: str, stop_string: str | None) -> Completion:
        self._leave(session)
        self._clock += 1
        session.state, session.parked_at = _State.PARKED, self._clock
        return Completion(
            session_id=session.session_id,
            token_ids=session.token_ids[session.turn_start :],
            log_probs=session.log_probs,
            model_log_probs=session.model_log_probs,
            finish_reason=reason,
            stop_string=stop_string,
            version_first=self.version if session.version_first is None else session.version_first,
            version_last=self.version,
        )

    # ---- weights, memory, figures ----

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all parameters, as (Hugging Face name, full tensor); caches are dropped, sessions stay.

        ValueError for unknown, missing or wrongly shaped ones; the engine then has no weights until the next
        call. A tied matrix may come under one of its names, or under each.
        """
        self._drop_caches()
        self.version = -1
        self._model.load(weights)
        self.version = version

    def sleep(self, level: int = 1) -> int:
        """Drop the caches (level 1) and the weights too (level 2); returns the bytes given back."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; expected 1 (caches) or 2 (caches and weights)")
        num_bytes = self._drop_caches()
        if level == 2:
            num_bytes += self._model.release()
            self.version = -1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._asleep = True
        return num_bytes

    def wake(self) -> None:
        """Allow steps again; caches come back as they are needed."""
        self._asleep = False

    def stats(self) -> dict[str, float]:
        """As `RolloutEngine.stats` says; there is no budget of bytes, and no prompt is shared."""
        parked = sum(session.state is _State.PARKED for session in self._sessions.values())
        return {
            "running": float(len(self._active)),
            "queued": float(len(self._queue)),
            "parked": float(parked),
            "kv_bytes": float(self._kv_bytes()),
            "weight_version": float(self.version),
            **{name: float(count) for name, count in self._counts.items()},
            "preemptions": 0.0,  # who is active stays so until its turn ends
            "seconds": self._seconds,
        }

    def shutdown(self) -> None:
        """Forget all sessions and weights. Safe to call twice."""
        self._sessions, self._queue, self._active = {}, deque(), []
        self._model.release()

    # ---- small things ----

    def _leave(self, session: _Session) -> None:
        if session.state is _State.QUEUED:
            self._queue.remove(session)
        elif session.state is _State.ACTIVE:
            self._active.remove(session)

    def _drop_caches(self) -> int:
        """Everybody's; returns their bytes. Turns under way start again from their tokens."""
        num_bytes = self._kv_bytes()
        for session in self._sessions.values():
            session.drop_cache()
        return num_bytes

    def _kv_bytes(self) -> int:
        return sum(session.cache.num_bytes for session in self._sessions.values() if session.cache)

    def _session(self, session_id: int) -> _Session:
        if session_id not in self._sessions:
            raise ValueError(f"no session {session_id}: it was never opened, or it was closed")
        return self._sessions[session_id]


def _sampling_rows(running: list[_Session]) -> SamplingRows:
    params = [session.params for session in running]
    seeds = np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64)
    counters = np.array([session.num_sampled for session in running], dtype=np.uint64)
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=uniforms(seeds, counters),
    )
