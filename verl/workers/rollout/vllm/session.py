"""One session of a vLLM engine: its tokens and its present turn.

vLLM has no sessions. Each turn is a request with all token ids so far; vLLM's prefix cache holds what it has
computed for the turns before, in whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.base import Completion, Partial, SamplingParams

SESSION_SEED = "session_seed"  # key of the seed in a request's extra_args
LEAST_TEMPERATURE = 0.01  # vLLM takes what lies below (and is not 0) as this


@dataclass(eq=False)
class VllmSession:
    """A trajectory and the turn under way.

    Attributes:
        context: all token ids so far, sampled ones included.
        limit: tokens that this turn may still have in all; below 1, there is no room for any.
        request: vLLM's own record of the turn's request, None between turns.
        token_ids, log_probs, model_log_probs: of the turn, as in `Completion`.
    """

    session_id: int
    context: list[int]
    params: SamplingParams | None = None
    limit: int = 0
    turn: int = 0
    request: Any = None
    under_way: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    version_first: int | None = None

    @property
    def request_id(self) -> str:
        """The present turn's name in vLLM."""
        return f"{self.session_id}-{self.turn}"

    def begin_turn(self, new_tokens: Sequence[int], params: SamplingParams, max_model_len: int) -> None:
        """Append prompt or observation tokens and set up a turn behind them."""
        self.context.extend(new_tokens)
        self.params = params
        self.limit = min(params.max_tokens, max_model_len - len(self.context))
        self.turn += 1
        self.under_way = True
        self.token_ids, self.log_probs, self.model_log_probs = [], [], []
        self.version_first = None

    def accept(self, token_id: int, log_prob: float, model_log_prob: float) -> tuple[str, str | None] | None:
        """Take a sampled token; (finish reason, stop string) if it ends the turn."""
        assert self.params is not None
        self.context.append(token_id)
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.model_log_probs.append(model_log_prob)
        stop_string = self.params.stop.match(self.token_ids) if self.params.stop else None
        if stop_string is not None:
            return "stop", stop_string
        if token_id in self.params.eos_token_ids and not self.params.ignore_eos:
            return "eos", None
        return ("length", None) if len(self.token_ids) >= self.limit else None

    def end_turn(self, reason: str, stop_string: str | None, version: int) -> Completion:
        """The turn as it is handed to the owner."""
        self.under_way = False
        self.request = None
        return Completion(
            session_id=self.session_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            model_log_probs=self.model_log_probs,
            finish_reason=reason,
            stop_string=stop_string,
            version_first=version if self.version_first is None else self.version_first,
            version_last=version,
        )

    def partial(self) -> Partial:
        """What the turn under way has sampled so far; nothing while there is none."""
        if not self.under_way:
            return Partial([], [], None)
        return Partial(list(self.token_ids), list(self.log_probs), self.version_first)


def check_supported(params: SamplingParams) -> None:
    """ValueError for what vLLM would silently do in another way than `SamplingParams` says."""
    if 0.0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}; vLLM takes 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
    if params.min_p > 0.0 and params.top_p < 1.0:
        raise ValueError(
            f"min_p={params.min_p} and top_p={params.top_p}: vLLM applies them in another order than the "
            "native engine. Switch one of them off (min_p=0 or top_p=1)"
        )
