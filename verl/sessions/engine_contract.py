"""The interface of a rollout engine to its owner, the agent loop: sessions in, completions out.

A session is one trajectory. `open` queues its prompt. `step` runs everything that can run and returns the
turns that ended. `resume` appends an observation and generates the next turn on the KV state that the session
still has. `close` gives the slot to the next session in the queue:

    open(prompt) -> [queued] -> [running] --Completion--> [waiting for its owner] -- resume(observation) --+
                                    ^                              |                                       |
                                    +------------------------------|---------------------------------------+
                                                                 close -> its memory is free

Token ids go in and token ids come out. The engine never sees text, as stop strings are matched on the bytes
of tokens (see `stop.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from verl.sessions.stop import StopCondition

TIED_HEAD = "lm_head.weight"


class EngineUnavailable(RuntimeError):
    """The error of an engine that can't run for a reason outside of this program.

    Its servers don't start, for example, or went away.
    """


@dataclass(frozen=True)
class SamplingParams:
    """The parameters by which one turn is sampled.

    Truncation is applied after the temperature, in the order top-k, top-p, min-p, and the result is
    renormalised. `Completion.log_probs` are those of the resulting distribution.

    Attributes:
        max_tokens: Maximum number of tokens sampled in this turn, >= 1.
        temperature: 0 means greedy. Log-probs are then those of the plain softmax (temperature 1).
        top_p: Keep the fewest most probable tokens whose sum reaches it, 0 < top_p <= 1 (1 = off).
        top_k: Keep the k most probable tokens (-1 or 0 = off).
        min_p: Drop tokens less probable than min_p times the most probable one, 0 <= min_p <= 1 (0 = off).
        seed: A 64-bit number. The k-th token sampled in a session depends on (seed, k) only, not on other
            sessions.
        drawn_before: Number of tokens that an earlier session has sampled with this seed. k continues from
            there.
        stop: Ends the turn at the token that completes a stop string. That token is kept whole.
        eos_token_ids: Ids that end the turn with finish_reason "eos". The token itself is kept.
        ignore_eos: Whether to go on after an end-of-sequence token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    drawn_before: int = 0
    stop: StopCondition | None = None
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; a turn needs room for at least 1 token")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; expected 0 < top_p <= 1 (1 switches it off)")
        if self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; expected a positive number (-1 or 0 switches it off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; expected 0 <= min_p <= 1 (0 switches it off)")


@dataclass(frozen=True)
class Completion:
    """A turn that ended: what was sampled, and why it stopped.

    `token_ids`, `log_probs` and `model_log_probs` have one entry per sampled token of this turn, the stop or
    eos token included. Log-probs are natural logarithms.

    Attributes:
        session_id: The session of the turn.
        token_ids: The sampled tokens.
        log_probs: Log-probs under the distribution that was sampled from, that is, after temperature, top-k,
            top-p and min-p, and renormalised. For greedy turns they are those of the plain softmax.
        model_log_probs: Log-probs under the model itself, the plain softmax of its logits at temperature 1.
        finish_reason: "stop" (a stop string, named in `stop_string`), "eos" or "length" (max_tokens or the
            engine's max_model_len).
        stop_string: The stop string that ended the turn, if one did.
        version_first: Version of the weights that sampled the turn's first token.
        version_last: Version of the weights that sampled the turn's last token.

    Example: Completion(7, [311, 22, 940], [-0.1, -2.3, -0.7], [-0.2, -2.0, -0.9], "stop", "</search>", 4, 4)
    """

    session_id: int
    token_ids: list[int]
    log_probs: list[float]
    model_log_probs: list[float]
    finish_reason: str
    stop_string: str | None
    version_first: int
    version_last: int


class Partial(NamedTuple):
    """A turn under way: tokens and log-probs so far (as in `Completion`), and its first token's version."""

    token_ids: list[int]
    log_probs: list[float]
    version_first: int | None


class Scores(NamedTuple):
    """The model's log-probs of a text's tokens, each after those before it.

    The first token has none, so that both lists have an entry less than the text has tokens.

    Attributes:
        log_probs: The log-prob of each token.
        most_probable: The (token id, log-prob) pairs of the most probable tokens at its place, best first.
    """

    log_probs: list[float]
    most_probable: list[list[tuple[int, float]]]


@dataclass(eq=False)
class RolloutSession:
    """A trajectory inside an engine: its tokens, and the turn that is being sampled.

    Attributes:
        session_id: The number of the session in its engine.
        params: The sampling of the present turn.
        tokens: All tokens so far, int32: prompt, sampled tokens and observations.
        turn: The number of the turn, from 1.
        turn_start: The position in `tokens` where the sampled tokens of this turn begin.
        limit: Maximum number of tokens of this turn. If it is below 1, there is no room for any.
        under_way: Whether the turn has not ended.
        num_sampled: Number of tokens sampled over all turns.
        check_ids: Token ids that need a look, because they end a sequence or can complete a stop string.
        log_probs: Log-probs of this turn, as in `Completion`.
        model_log_probs: The model's log-probs of this turn, as in `Completion`.
        version_first: Version of the weights that sampled the first token of this turn.
    """

    session_id: int
    params: SamplingParams
    tokens: array[int] = field(default_factory=lambda: array("i"))
    turn: int = 0
    turn_start: int = 0
    limit: int = 0
    under_way: bool = False
    num_sampled: int = 0
    check_ids: frozenset[int] = frozenset()
    log_probs: list[float] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    version_first: int | None = None

    def begin_turn(self, params: SamplingParams, new_tokens: Sequence[int], max_model_len: int) -> None:
        """Append a prompt or an observation and set up the turn that follows it."""
        self.turn += 1
        self.params = params
        self.tokens.extend(new_tokens)
        self.turn_start = len(self.tokens)
        self.limit = min(params.max_tokens, max_model_len - self.turn_start)
        self.log_probs = []
        self.model_log_probs = []
        self.version_first = None
        eos: frozenset[int] = frozenset() if params.ignore_eos else params.eos_token_ids
        self.check_ids = eos | (params.stop.candidate_ids if params.stop else frozenset())
        self.under_way = True

    def accept(
        self, token_id: int, log_prob: float, model_log_prob: float, version: int
    ) -> tuple[str, str | None] | None:
        """Append a sampled token.

        Returns (finish reason, stop string) if the token ends the turn, otherwise None.
        """
        if self.version_first is None:
            self.version_first = version
        self.tokens.append(token_id)
        self.log_probs.append(log_prob)
        self.model_log_probs.append(model_log_prob)
        self.num_sampled += 1
        if token_id in self.check_ids:
            stop_string = self.params.stop.match(self.tokens[self.turn_start :]) if self.params.stop else None
            if stop_string is not None:
                return "stop", stop_string
            if token_id in self.params.eos_token_ids and not self.params.ignore_eos:
                return "eos", None
        return ("length", None) if len(self.log_probs) >= self.limit else None

    def end_turn(self, reason: str, stop_string: str | None, version: int) -> Completion:
        """End the turn and return it for the owner. `version` is that of its last token."""
        self.under_way = False
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


Session = TypeVar("Session", bound=RolloutSession)


class RolloutEngine(ABC, Generic[Session]):
    """An engine that samples the turns of sessions for the agent loop (see the drawing above).

    It is not thread-safe. A single owner calls it.

    Attributes:
        max_model_len: Maximum number of tokens of one session, prompt and observations included. A turn that
            reaches it ends with "length".
        vocab_size: All token ids are smaller than this.
        keeps_kv: Whether sessions go on with the KV state of older weights when new weights are loaded. That
            is faster, but what they sample then is of neither policy. False means that KV state is computed
            again. Set it before the first session.
        version: Version of the present weights, or -1 while there are none.
    """

    session_class: type[Session]
    keeps_kv = False

    def __init__(self, max_model_len: int, vocab_size: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.version = -1
        self._sessions: dict[int, Session] = {}
        self._without_room: list[Session] = []  # resumed with more tokens than max_model_len has room for
        self._next_id = 0
        self._steps = self._generated_tokens = self._asleep = 0  # _asleep is the level of `sleep`
        self._seconds = 0.0

    # ---- sessions ----

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt and return its session id.

        Raises:
            ValueError: If the prompt is empty, has unknown ids or leaves no room, or if the engine can't
                sample with these parameters.
        """
        self._check_params(params)
        tokens = self._checked(token_ids)
        if not 0 < len(tokens) < self.max_model_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens; expected 1 to {self.max_model_len - 1}, "
                f"one less than max_model_len={self.max_model_len}"
            )
        session = self.session_class(self._next_id, params)
        self._next_id += 1
        self._sessions[session.session_id] = session
        session.begin_turn(params, tokens, self.max_model_len)
        self._queue(session)
        return session.session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens to a session whose turn ended, and queue its next turn.

        There may be no observation tokens. If they leave no room within max_model_len, the next `step`
        returns an empty completion with "length".

        Raises:
            ValueError: If the session has a turn under way, is closed or was never opened, if the ids are
                unknown, or if the engine can't sample with these parameters.
        """
        session = self._session(session_id)
        if session.under_way:
            raise ValueError(f"session {session_id} has a turn under way; only one that ended can be resumed")
        self._check_params(params)
        session.begin_turn(params, self._checked(token_ids), self.max_model_len)
        if session.limit < 1:
            self._without_room.append(session)
        else:
            self._queue(session)

    def close(self, session_id: int) -> None:
        """End a session in whatever state it is. What it held goes to the next session in the queue."""
        session = self._session(session_id)
        del self._sessions[session_id]
        if session in self._without_room:
            self._without_room.remove(session)
            session.under_way = False
        self._drop(session)

    def partial(self, session_id: int) -> Partial:
        """Return what a session's present turn has sampled so far, or nothing while no turn is under way."""
        session = self._session(session_id)
        if not session.under_way:
            return Partial([], [], None)
        tokens = session.tokens[session.turn_start :].tolist()
        return Partial(tokens, list(session.log_probs), session.version_first)

    def _session(self, session_id: int) -> Session:
        if session_id not in self._sessions:
            raise ValueError(f"no session {session_id}: it was closed, or never opened")
        return self._sessions[session_id]

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        tokens = [int(token_id) for token_id in token_ids]
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            raise ValueError(
                f"token ids range from {min(tokens)} to {max(tokens)}; the model has 0 to "
                f"{self.vocab_size - 1}. Do the tokenizer and the model belong together?"
            )
        return tokens

    def _check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that this engine can't sample with."""

    def _end_without_room(self) -> list[Completion]:
        """End the turns that have no room for a token."""
        ended = [session.end_turn("length", None, self.version) for session in self._without_room]
        self._without_room = []
        return ended

    @abstractmethod
    def _queue(self, session: Session) -> None:
        """Queue the session's turn, which is set up, so that the coming steps sample it."""

    @abstractmethod
    def _drop(self, session: Session) -> None:
        """Let go of what is held for a session, in whatever state it is."""

    def score(self, token_ids: Sequence[int], num_most_probable: int) -> Scores:
        """Return the log-probs of a text's tokens under the present weights. No session is concerned.

        Raises:
            ValueError: If the engine can't, or the text is empty, too long or has unknown ids.
        """
        raise ValueError(
            f"{type(self).__name__} gives no log-probs of a prompt; serve the model with the native engine"
        )

    # ---- what runs ----

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Enclose a generation, in every process of an engine that several processes share.

        Yields True in the process that has the engine's sessions and steps it. Yields False in the others,
        which have followed the whole generation by then.
        """
        yield True

    @property
    @abstractmethod
    def has_runnable(self) -> bool:
        """Return True if `step` has something to do. Sessions that wait for `resume` don't count."""

    def step(self) -> list[Completion]:
        """Advance what runs, and return the turns that ended, if any.

        Raises:
            RuntimeError: If the engine sleeps or has no weights.
        """
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake first")
        if not self.has_runnable:
            return []
        if self.version < 0:
            raise RuntimeError("the engine has no complete weights; call load_weights first")
        start = time.perf_counter()
        ended = self._advance() + self._end_without_room()
        self._steps += 1
        self._seconds += time.perf_counter() - start
        return ended

    @abstractmethod
    def _advance(self) -> list[Completion]:
        """Do the work of `step`, except for the turns without room. The engine is awake and has weights."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take (Hugging Face name, full tensor) pairs of the whole model as weights `version`.

        Sessions stay, with their tokens. KV state of older weights is no longer used, but computed again from
        the tokens. With `keeps_kv` sessions go on with the KV state that they have, and only sessions that
        are opened from now on don't use it. Turns under way go on with the new weights.

        Raises:
            ValueError: If weights are unknown, missing or wrongly shaped (`lm_head.weight` may be left out
                when embeddings are tied). The engine then has no weights until the next call.
        """

    def sleep(self, level: int = 1) -> int:
        """Give memory to the trainer, and return the number of bytes given back.

        Sessions stay, as in `load_weights`. An engine without memory on the trainer's devices has none to
        give.

        Args:
            level: 1 frees the KV cache. 2 also frees the engine's weights, so that `load_weights` must come
                before the next step.
        """
        return 0

    def wake(self) -> None:  # noqa: B027
        """Take the memory again. An engine that is awake does nothing."""

    def stats(self) -> dict[str, float]:
        """Return the present load, and sums since construction. Engines add their own figures to those here.

        Present load: running, queued (no KV state yet, or preempted), parked (turn ended, waiting for the
        owner), kv_used_share (share of the budget).

        Sums: steps, generated_tokens, prefilled_tokens (computed), prefix_hit_tokens (taken from existing KV
        state, such as that of a shared prompt), preemptions, seconds (in `step`).

        An engine that can't know a figure leaves it out.
        """
        return {
            "parked": float(sum(not session.under_way for session in self._sessions.values())),
            "steps": float(self._steps),
            "generated_tokens": float(self._generated_tokens),
            "seconds": self._seconds,
        }

    @abstractmethod
    def shutdown(self) -> None:
        """End what the engine has started and free what it holds. It is safe to call twice."""


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs of `weights` after checking each one.

    A tied `lm_head.weight` (one that `expected` doesn't have) is left out, because the embedding has its
    values.

    Raises:
        ValueError: If a pair is unknown or wrongly shaped, or, at the end, if some are missing.
    """
    missing = dict(expected)
    for name, tensor in weights:
        if name == TIED_HEAD and TIED_HEAD not in expected:
            continue
        if name not in expected:
            raise ValueError(f"the model has no weight {name}; send Hugging Face names of {_some(expected)}")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}; the model's config says {expected[name]}"
            )
        missing.pop(name, None)
        yield name, tensor.detach()
    if missing:
        raise ValueError(f"missing weights: {_some(missing)}. Send the whole model")


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
