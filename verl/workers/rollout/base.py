"""What a rollout engine is to its owner (the agent loop): sessions in, completions out.

A session is one trajectory. `open` queues its prompt, `step` runs everything that can run and hands back the
turns that ended, `resume` appends an observation and generates the next turn on the KV state that is still
there, `close` gives the slot to the next session in the queue:

    open(prompt) -> [queued] -> [running] --Completion--> [waiting for its owner] -- resume(observation) --+
                                    ^                              |                                       |
                                    +------------------------------|---------------------------------------+
                                                                 close -> its memory is free

Token ids go in and token ids come out: the engine never sees text (stop strings are matched on the bytes of
tokens, see `stop.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from verl.workers.rollout.stop import StopCondition


class EngineUnavailable(RuntimeError):
    """The engine can't run, for a reason outside of this program: its servers don't start, or went away."""


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is sampled.

    Truncation is applied after the temperature, in the order top-k, top-p, min-p, and the result is
    renormalised; `Completion.log_probs` are those of the distribution that is left.

    Attributes:
        max_tokens: most tokens sampled in this turn, >= 1.
        temperature: 0 = greedy; then log-probs are those of the plain softmax (temperature 1).
        top_p: keep the fewest most probable tokens whose sum reaches it, 0 < top_p <= 1 (1 = off).
        top_k: keep the k most probable tokens (-1 or 0 = off).
        min_p: drop tokens less probable than min_p times the most probable one, 0 <= min_p <= 1 (0 = off).
        seed: 64-bit; the k-th token sampled in a session depends on (seed, k) only, not on other sessions.
        stop: ends the turn at the token that completes a stop string; that token is kept whole.
        eos_token_ids: end the turn with finish_reason "eos"; the token itself is kept.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
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
    """One turn that ended: what was sampled, and why it stopped.

    `token_ids`, `log_probs` and `model_log_probs` have one entry per sampled token of this turn (the stop or
    eos token too). `log_probs` are those of the distribution that was sampled from: after temperature, top-k,
    top-p and min-p, renormalised; for greedy turns, of the plain softmax. `model_log_probs` are those of the
    model itself: the plain softmax of its logits at temperature 1. Both are natural logarithms.
    `finish_reason` is "stop" (a stop string, named in `stop_string`), "eos" or "length" (max_tokens or the
    engine's max_model_len). `version_first` and `version_last` are the weight versions of the turn's first
    and last token.

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


class RolloutEngine(Protocol):
    """The engine's side of the agent loop; see the drawing above. Not thread-safe: one owner calls it.

    Attributes:
        max_model_len: most tokens of one session, prompt and observations included.
        version: of the present weights, -1 before the first `load_weights`.
    """

    max_model_len: int
    version: int

    @property
    def has_runnable(self) -> bool:
        """True if `step` has something to do. Sessions that wait for `resume` don't count."""

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt and return its session id. ValueError if it leaves no room to generate."""

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens to a session whose turn ended, and sample its next turn."""

    def close(self, session_id: int) -> None:
        """End a session in whatever state it is; what it held goes to the next in the queue."""

    def step(self) -> list[Completion]:
        """Advance what runs; return the turns that ended. May return none while turns are under way."""

    def partial(self, session_id: int) -> Partial:
        """What a session's present turn has sampled so far; nothing while no turn is under way."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take (Hugging Face name, full tensor) pairs of the whole model as weights `version`.

        Sessions stay, with the tokens that they have; no KV state of older weights is used any more: it is
        computed again from the tokens. Turns under way go on with the new weights.
        """

    def sleep(self, level: int = 1) -> int:
        """Give memory to the trainer; sessions stay as in `load_weights`. Returns the bytes given back.

        Level 1: the KV cache. Level 2: the engine's weights too, then `load_weights` comes before the next
        step. Asleep, `step` raises RuntimeError.
        """

    def wake(self) -> None:
        """Take the memory again. Does nothing when awake."""

    def stats(self) -> dict[str, float]:
        """Load now, and sums since construction.

        Now: running, queued (no KV state yet, or preempted), parked (turn ended, waiting for the owner),
        kv_bytes (held), kv_used_share (of the budget), weight_version.
        Sums: steps, generated_tokens, prefilled_tokens (computed), prefix_hit_tokens (taken from KV state
        that was there: a shared prompt), preemptions, seconds (in `step`). An engine that can't know a figure
        leaves it out.
        """

    def shutdown(self) -> None:
        """End what the engine has started and free what it holds. Safe to call twice."""


def checked_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The ids of a prompt. ValueError if it is empty, has unknown ids, or leaves no room to generate."""
    tokens = checked_tokens(token_ids, vocab_size)
    if not 0 < len(tokens) < max_model_len:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens; expected 1 to {max_model_len - 1}, "
            f"one less than max_model_len={max_model_len}"
        )
    return tokens


def checked_tokens(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list of int. ValueError if the model does not know one."""
    tokens = [int(token_id) for token_id in token_ids]
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise ValueError(
            f"token ids range from {min(tokens)} to {max(tokens)}; the model has 0 to {vocab_size - 1}. "
            "Do the tokenizer and the model belong together?"
        )
    return tokens
