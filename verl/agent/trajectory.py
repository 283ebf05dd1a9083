"""Texts and token ids of a trajectory: the codec, the trajectory while it grows, the tensors made from many.

    sampled ids -> Codec.decode_turn -> the environment
    its observation -> Codec.observation_ids -> appended once to the context

    prompt | policy's tokens | observation | policy's tokens | ...      response = all after the prompt
             mask 1 ... 1      0 ... 0       1 ... 1

Sampled ids become text only to be read for an action; ids are only ever appended, and nothing is decoded and
encoded again. A trajectory that is kept for the next step travels as its row of the batch and its record (see
`continuations` of verl/trainer/ppo/collection.py); `Trajectory.continued` makes it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from verl.environments.base import Message
from verl.environments.executors import Episode
from verl.environments.registry import SEARCH
from verl.utils.dataset.rl_dataset import encode_prompt, prompt_text
from verl.utils.reward_score.qa_em import join_turns
from verl.workers.rollout.base import Partial, SamplingParams
from verl.workers.rollout.stop import StopCondition

KEPT = "kept"  # finish_reason of a trajectory that goes on in the next step
_MARK = re.compile(r"content-\d+-of-a-message")
# Search-R1's; a tokenizer may have them as special tokens, which observations may hold as such.
PROTOCOL_TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")
)


@dataclass(frozen=True)
class AgentConfig:
    """How trajectories are made.

    Lengths in tokens, as in Search-R1: a prompt keeps its last `max_start_length`, a turn samples at most
    `max_response_length`, an observation has at most `max_obs_length`, a whole context `max_prompt_length`;
    what can't go on within that ends with "length". `max_turns`: actions of an episode, where its row does
    not say; after that many searches comes one last turn, whose search is not made any more.

    `search_delay_steps`: an observation joins exactly so many engine steps after its action was taken, which
    makes the engine's batches, and with them float rounding, repeatable; None: as soon as it is there.
    `max_in_flight`: most trajectories under way at a time, those that wait too; None: all.
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
    search_delay_steps: int | None = None
    max_in_flight: int | None = None
    straggler_factor: float | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"), 1
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
        eos_token_ids: the tokenizer's end of sequence, if it has one, and the model's.
    """

    def __init__(self, tokenizer: Any, config: AgentConfig, observation_format: str | None = None) -> None:
        """observation_format: see `environment.observation_format`."""
        self.tokenizer, self.max_obs_length = tokenizer, config.max_obs_length
        self._format = observation_format
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(config.eos_token_ids) | (set() if eos is None else {eos})
        # Ids that no document may become: an end of sequence that it spells out is plain text.
        added = tokenizer.added_tokens_decoder.items()
        self._control_ids = {*tokenizer.all_special_ids, *(id_ for id_, token in added if token.special)}
        self._control_ids -= set(tokenizer.convert_tokens_to_ids(list(PROTOCOL_TAGS)))
        self._encode_cached = lru_cache(maxsize=4096)(self.encode)  # a group asks the same thing often
        self.decode_prompt = lru_cache(maxsize=4096)(self.decode)  # and has one prompt
        self._is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        self.stop = cache(self._stop)

    def _stop(self, strings: tuple[str, ...]) -> StopCondition | None:
        """What ends a turn at one of these strings; None without strings."""
        return StopCondition(self.tokenizer, strings) if strings else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that continues a context: nothing is added around it.

        A control token's name in the text (an end of sequence, a role marker) is split like any other words.
        """
        if self._is_fast:  # without the conversions around it, which cost as much
            backend = self.tokenizer.backend_tokenizer
            backend.no_padding()  # what an earlier call has set
            backend.no_truncation()
            backend.encode_special_tokens = False
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:  # not verbose: no warning of a text that is too long for the model, which is cut afterwards
            ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if not self._control_ids.isdisjoint(ids):
            ids = self.tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        if self._is_fast:
            return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Text of a turn; end-of-sequence tokens at its end are not text."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.eos_token_ids:
            end -= 1
        return self.decode(token_ids[:end])

    def is_chat(self, env_class: str) -> bool:
        """Whether an environment's observations are messages of the chat template."""
        if self._format is None:
            return bool(self.tokenizer.chat_template) and env_class != SEARCH
        return self._format == "chat"

    def prompt_ids(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """A prompt's tokens, as in a row of the data."""
        return encode_prompt(self.tokenizer, prompt_text(self.tokenizer, messages, tools))

    def chat_ids(self, messages: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """What follows an assistant's turn: its end, the messages, and the beginning of the next turn, as the
        tokenizer's chat template has it. At most `max_obs_length` tokens; contents are cut, the template not.

        Args:
            last_id: of the turn. If it is the end of sequence with which the template ends a turn, that is
                not said again.

        Raises:
            ValueError: the template is not one to which messages can be appended.
        """
        pieces = self._bridge(messages)
        if last_id is not None and last_id in self.eos_token_ids:
            pieces[0] = pieces[0].removeprefix(self.decode([last_id]))
        contents = [str(message["content"]) for message in messages]
        encode = self.tokenizer.encode
        whole = pieces[0] + "".join(
            content + piece for content, piece in zip(contents, pieces[1:], strict=True)
        )
        ids = encode(whole, add_special_tokens=False, verbose=False)
        spelled = encode("\n".join(contents), add_special_tokens=False, verbose=False)
        if len(ids) <= self.max_obs_length and self._control_ids.isdisjoint(spelled):
            return tuple(ids)
        frame = [encode(piece, add_special_tokens=False, verbose=False) for piece in pieces]
        room = self.max_obs_length - sum(map(len, frame))
        if room < 0:
            raise ValueError(
                f"data.max_obs_length: found {self.max_obs_length}, but the chat template alone takes "
                f"{self.max_obs_length - room} tokens; raise it, or set environment.observation_format=raw"
            )
        parts = list(frame[0])
        for content, after in zip(contents, frame[1:], strict=True):
            cut = self.encode(content)[:room]
            room -= len(cut)
            parts += [*cut, *after]
        return tuple(parts)

    def _bridge(self, messages: Sequence[Message]) -> list[str]:
        """The chat template's text around the contents of messages that follow an assistant's turn."""
        marks = [f"content-{number}-of-a-message" for number in range(len(messages) + 1)]
        history = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": marks[0]}]
        appended = [{**each, "content": mark} for each, mark in zip(messages, marks[1:], strict=True)]
        render = self.tokenizer.apply_chat_template
        end_of_turn = render(history, tokenize=False).partition(marks[0])[2]
        text = render([*history, *appended], tokenize=False, add_generation_prompt=True)
        pieces = _MARK.split(text)[1:]
        if _MARK.findall(text) != marks or not pieces[0].startswith(end_of_turn):
            raise ValueError(
                "the tokenizer's chat template does not just append messages; set "
                "environment.observation_format=raw"
            )
        return pieces

    def observation_ids(self, text: str, closing: str = "") -> tuple[int, ...]:
        """An observation's tokens, at most `max_obs_length`; where it ends in `closing`, one that is too long
        loses text before that, never the closing text.
        """
        ids = self._encode_cached(text)
        if len(ids) <= self.max_obs_length:
            return ids
        end = self._encode_cached(closing) if closing and text.endswith(closing) else ()
        return ids[: self.max_obs_length - len(end)] + end


@dataclass
class Turn:
    """One generation of the policy and what came back.

    `action`: what the environment calls it; "step" where it has no names. Of searches: "search" | "answer" |
    "invalid" (the policy got a hint) | "none" (the last turn had no action). `details`: what the environment
    says of it, plain data; the record has them beside the rest (of searches: query, documents,
    search_seconds). Spans are positions in the response, end exclusive; the obs span is None when nothing was
    appended.
    """

    action: str
    text: str
    start: int
    end: int
    error: str | None = None  # why the environment could not take it
    obs_start: int | None = None
    obs_end: int | None = None
    reward: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Turn:
        """The turn that a record has."""
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        return cls(**known, details={name: record[name] for name in record if name not in known})

    def record(self, is_search: bool) -> dict[str, Any]:
        """Its plain dict."""
        record = vars(self) | self.details | vars(self)  # details can't take the place of a span
        del record["details"]
        if is_search:  # its reward is the trajectory's
            del record["reward"]
        return record


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
    # "answer" | "done" | "eos" | "length" | "max_turns" | "search_failed" | "env_failed" | "unverified" |
    # "cut" | "kept"; "" while it runs
    finish_reason: str = ""
    version_first: int | None = None  # policy version of the first and of the last sampled token
    version_last: int | None = None
    num_begun: int = 0  # of the last response tokens: of a turn that has not ended
    num_old_turns: int | None = None  # turns of an earlier step; None: begun in this one
    env_class: str = SEARCH
    extras: Mapping[str, Any] = field(default_factory=dict)  # columns of its row, for its environment
    messages: list[Message] = field(default_factory=list)  # its prompt, for its environment
    max_turns: int = 0  # actions of its episode
    params: SamplingParams | None = None  # of its turns; None: the loop's
    drawn_before: int = 0  # tokens that it had sampled when its session began
    episode: Episode | None = None  # while it runs, as the next three
    session_id: int | None = None  # None: it has had none yet
    stopped_by: str = "stop"  # why its last generation ended, as in `Completion`
    num_shown: int = 0  # characters of its running turn that `on_event` has heard
    seconds: tuple[float, float] = (0.0, 0.0)  # of its environment, in init and in all steps
    env_metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why its environment failed
    kept_env: bytes | None = None

    @classmethod
    def continued(cls, row: int, prompt_ids: list[int], seed: int, state: Mapping[str, Any]) -> Trajectory:
        """One of an earlier step as it was, finished or to be gone on with.

        Args:
            state: its `response_ids`, `response_mask`, `log_probs` without padding, and its `record`.
        """
        record = state["record"]
        kept = record.get("kept", {})
        turns = [Turn.of_record(turn) for turn in record["turns"]]
        is_open = record["finish_reason"] == KEPT
        return cls(
            row,
            kept.get("prompt_ids", prompt_ids),
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
            seconds=(record.get("env_seconds_init", 0.0), record.get("env_seconds_step", 0.0)),
            env_metrics=record.get("env_metrics", {}),
            error=record.get("env_error"),
            kept_env=kept.get("env"),
        )

    @property
    def num_tokens(self) -> int:
        """Length of the whole context, prompt included."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def is_asking(self) -> bool:
        """Whether its environment has its last turn, or had it when the trajectory was kept."""
        return bool(self.turns) and self.turns[-1].obs_start is None and not self.num_begun

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
        is_search = self.env_class == SEARCH
        record = {
            "turns": [turn.record(is_search) for turn in self.turns],
            "num_searches": sum(turn.details.get("documents") is not None for turn in self.turns),
            "num_actions": len(self.turns),
            "num_valid_actions": sum(turn.action not in ("invalid", "none") for turn in self.turns),
            "finish_reason": self.finish_reason,
            "version_first": self.version_first,
            "version_last": self.version_last,
            "num_begun": self.num_begun,
            "prompt_text": prompt_text,
            "policy_text": join_turns(turn.text for turn in self.turns),
        }
        if not is_search:
            rewards = [turn.reward for turn in self.turns if turn.reward is not None]
            record |= {
                "env_class": self.env_class,
                "env_reward": sum(rewards) if rewards else None,  # None: the run's reward function scores
                "env_metrics": self.env_metrics,
                "env_error": self.error,
                "env_seconds_init": self.seconds[0],
                "env_seconds_step": self.seconds[1],
            }
        if self.kept_env is not None and self.finish_reason == KEPT:
            record["kept"] = {"env": self.kept_env, "prompt_ids": self.prompt_ids}
        return record


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
