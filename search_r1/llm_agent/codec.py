"""Between the agent's text and the policy's token ids: the only place that knows the tokenizer.

Documents become observation ids, appended once. Sampled ids become the text of a turn, which is read for its
action and never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from search_r1.llm_agent.actions import (
    ANSWER_END,
    HINT,
    INFORMATION_END,
    SEARCH_END,
    format_observation,
)
from search_r1.llm_agent.config import GenerationConfig
from search_r1.search.client import FoundDocument
from verl.workers.rollout.stop import StopCondition


class Codec:
    """Tokenizer, stop strings and lengths of one run.

    Attributes:
        stop: ends a turn at `</search>` and `</answer>` (without search: at `</answer>`).
        eos_token_ids: the tokenizer's end of sequence, if it has one.
        hint_ids: tokens of the hint that follows a turn without an action.
    """

    def __init__(self, tokenizer: Any, config: GenerationConfig) -> None:
        """Raises ValueError if `max_obs_length` has no room for an empty observation."""
        self.tokenizer, self.max_obs_length = tokenizer, config.max_obs_length
        self.stop = StopCondition(tokenizer, [SEARCH_END, ANSWER_END] if config.do_search else [ANSWER_END])
        eos = tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset({eos})
        self._encode_cached = lru_cache(maxsize=4096)(self.encode)  # a group asks the same thing often
        self._closing_ids = self.encode(INFORMATION_END)
        empty = len(self.encode(format_observation([])))
        if config.do_search and config.max_obs_length < empty:
            raise ValueError(
                f"max_obs_length: found {config.max_obs_length}, expected at least {empty}: "
                "the tags alone have so many tokens"
            )
        self.hint_ids = self.encode(HINT)[: config.max_obs_length]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that continues a context: nothing is added around it."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Text of a turn; end-of-sequence tokens at its end are not text."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.eos_token_ids:
            end -= 1
        return self.decode(token_ids[:end])

    def observation_ids(self, documents: Sequence[FoundDocument]) -> tuple[int, ...]:
        """The observation's tokens; one that is too long loses text before its closing tag, never the tag."""
        ids = self._encode_cached(format_observation(documents))
        if len(ids) <= self.max_obs_length:
            return ids
        return ids[: self.max_obs_length - len(self._closing_ids)] + self._closing_ids
