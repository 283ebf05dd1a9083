"""Texts and token ids of a trajectory: the codec, the trajectory while it grows, the tensors made from many.

    sampled ids -> Codec.decode_turn -> parse_action -> Action("search", "who wrote X")
    documents   -> format_observation -> Codec.observation_ids -> appended once to the context

    prompt | policy's tokens | observation | policy's tokens | ...      response = all after the prompt
             mask 1 ... 1      0 ... 0       1 ... 1

Sampled ids become text only to be read for an action; ids are only ever appended, and nothing is decoded and
encoded again. Tags and the layout of an observation are Search-R1's, to the character: policies are trained
on them. A trajectory that is kept for the next step travels as its row of the batch and its record (see
`continuations` of verl/trainer/ppo/collection.py); `Trajectory.continued` makes it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from search_r1.search.client import FoundDocument
from verl.utils.reward_score.qa_em import join_turns
from verl.workers.rollout.base import Partial
from verl.workers.rollout.stop import StopCondition

KEPT = "kept"  # finish_reason of a trajectory that goes on in the next step
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
    """How trajectories are made.

    Lengths in tokens, as in Search-R1: a prompt keeps its last `max_start_length`, a turn samples at most
    `max_response_length`, an observation has at most `max_obs_length`, a whole context `max_prompt_length`;
    what can't go on within that ends with "length". After `max_turns` turns comes one last turn, whose search
    is not made any more.

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


@dataclass(frozen=True)
class Event:
    """What `on_event` is told while trajectories run.

    kind: "text" (the policy wrote `text`) | "search" (`text` is the query) | "observation" (`documents`
    came) | "hint" (`text` is said to the policy after a turn without an action) | "end" (`text`: the reason).
    """

    kind: Literal["text", "search", "observation", "hint", "end"]
    row: int
    text: str = ""
    documents: list[FoundDocument] = field(default_factory=list)


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
