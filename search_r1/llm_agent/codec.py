"""Between the agent's text and the policy's token ids: tags, lengths, and the tokenizer, known here alone.

    sampled ids -> Codec.decode_turn -> parse_action -> Action("search", "who wrote X")
    documents   -> format_observation -> Codec.observation_ids -> appended once to the context

Sampled ids become text only to be read for an action; they are never encoded again. Tags and the layout of an
observation are Search-R1's, to the character: policies are trained on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from search_r1.search.client import FoundDocument
from verl.workers.rollout.stop import StopCondition

SEARCH_END, ANSWER_END = "</search>", "</answer>"
INFORMATION_START, INFORMATION_END = "\n\n<information>", "</information>\n\n"

# Shown after a turn without an action. Without a tag in it: nobody can take it for an answer or a search.
HINT = (
    "\n\nThere was no action in this. To look something up, put a query between search tags; "
    "to finish, put the answer between answer tags.\n\n"
)

_TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")
)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What a turn asks for. `content`: the query or the answer, stripped; "" for an invalid turn."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str, do_search: bool = True) -> Action:
    """The first complete search or answer in the policy's text of one turn.

    A search without a query is invalid: there is nothing to send. Without `do_search` only answers count.
    """
    for match in _ACTION.finditer(text):
        kind, content = match[1], match[2].strip()
        if kind == "answer":
            return Action("answer", content)
        if do_search:
            return Action("search", content) if content else Action("invalid")
    return Action("invalid")


def format_documents(documents: Sequence[FoundDocument]) -> str:
    """`Doc 1(Title: ...) text` per document, one a line; the title is the first line of `contents`."""
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()


def format_observation(documents: Sequence[FoundDocument]) -> str:
    """The text that is appended after a search."""
    return f"{INFORMATION_START}{format_documents(documents)}{INFORMATION_END}"


@dataclass(frozen=True)
class GenerationConfig:
    """How trajectories are made. Lengths in tokens; `generation.py` says what they bound.

    `search_url`: where a manager that gets no search client searches. `num_gpus`: Search-R1 gives it;
    nothing reads it, as batches need no multiple of it here.
    `search_delay_steps`: an observation joins exactly so many engine steps after its search was asked, which
    makes the engine's batches, and with them float rounding, repeatable; None: as soon as it is there.
    `max_in_flight`: most trajectories under way at a time, those that wait for a search too; None: all.
    `straggler_factor`: training batches don't wait for groups later than so many times the median (see
    `stragglers.py`); measured in seconds, with `search_delay_steps` in engine steps; None: they wait.
    `temperature`, `top_p`, `top_k` are used where a batch's `meta_info` does not say.
    `eos_token_ids`: ids that end a turn beside the tokenizer's end of sequence (`generation_eos_ids`).
    """

    max_turns: int
    max_start_length: int
    max_prompt_length: int
    max_response_length: int
    max_obs_length: int
    num_gpus: int | None = None
    no_think_rl: bool = False
    search_url: str | None = None
    topk: int = 3
    do_search: bool = True
    search_delay_steps: int | None = None
    max_in_flight: int | None = None
    straggler_factor: float | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length", "topk"), 1
        )
        least |= {"max_turns": 0, "search_delay_steps": 0, "max_in_flight": 1, "straggler_factor": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ValueError(f"{name}: found {value}, expected {bound} or more")
        if self.max_start_length >= self.max_prompt_length:
            raise ValueError(
                f"max_start_length: found {self.max_start_length}, expected less than max_prompt_length "
                f"({self.max_prompt_length}), which bounds the prompt and everything after it"
            )
        if self.no_think_rl:
            raise ValueError(
                "no_think_rl: found true; only false works, ids that were not sampled are not trained"
            )


def generation_eos_ids(model: str | None) -> tuple[int, ...]:
    """The ids that end a turn by the model's generation_config.json; () without a model or such a file."""
    from transformers import GenerationConfig as ModelGenerationConfig

    if model is None:
        return ()
    try:
        eos = ModelGenerationConfig.from_pretrained(Path(model).expanduser()).eos_token_id
    except OSError:
        return ()
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


class Codec:
    """Tokenizer, stop strings and lengths of one run.

    Attributes:
        stop: ends a turn at `</search>` and `</answer>` (without search: at `</answer>`).
        eos_token_ids: the tokenizer's end of sequence, if it has one, and the model's.
        hint_ids: tokens of the hint that follows a turn without an action.
    """

    def __init__(self, tokenizer: Any, config: GenerationConfig) -> None:
        """Raises ValueError if `max_obs_length` has no room for an empty observation."""
        self.tokenizer, self.max_obs_length = tokenizer, config.max_obs_length
        self.stop = StopCondition(tokenizer, [SEARCH_END, ANSWER_END] if config.do_search else [ANSWER_END])
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(config.eos_token_ids) | (set() if eos is None else {eos})
        # Ids that no document may become: an end of sequence that it spells out is plain text.
        added = tokenizer.added_tokens_decoder.items()
        self._control_ids = {*tokenizer.all_special_ids, *(id_ for id_, token in added if token.special)}
        self._control_ids -= set(tokenizer.convert_tokens_to_ids(list(_TAGS)))
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
        """Token ids of a text that continues a context: nothing is added around it.

        A control token's name in the text (an end of sequence, a role marker) is split like any other words.
        """
        # Not verbose: no warning of a text that is too long for the model, which is cut afterwards.
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if not self._control_ids.isdisjoint(ids):
            ids = self.tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        return tuple(ids)

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
