"""A trajectory while it grows: its tokens, turns and contexts.

    prompt | policy's tokens | observation | policy's tokens | ...      response = all after the prompt
             mask 1 ... 1      0 ... 0       1 ... 1

Ids are only ever appended. A trajectory that is kept for the next step travels as its row of the batch and
its record (see `continuations` of verl/trainer/ppo/collection.py); `Trajectory.continued` makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.environments.base import BaseTextEnvStepOutput, Message
from verl.environments.executors import Episode
from verl.environments.registry import SEARCH
from verl.utils.reward_score.qa_em import join_turns
from verl.workers.rollout.base import Partial, SamplingParams

KEPT = "kept"  # finish_reason of a trajectory that goes on in the next step


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
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


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
    version_first: int | None = None  # of the weights that sampled its first token
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
    version_begun: int | None = None  # of the first of these
    num_old_turns: int | None = None  # turns of an earlier step; None: begun in this one
    contexts: list[int] = field(default_factory=list)  # where in the response another context begins
    env_class: str = SEARCH
    extras: Mapping[str, Any] = field(default_factory=dict)  # columns of its row, for its environment
    messages: list[Message] = field(default_factory=list)  # its prompt, for its environment
    max_turns: int = 0  # actions of its episode
    params: SamplingParams | None = None  # of its turns; None: the loop's
    columns: dict[str, Any] = field(default_factory=dict)  # of a row that was submitted to a rollout process
    drawn_before: int = 0  # tokens that it had sampled when its session began
    episode: Episode | None = None  # while it runs, as the next three
    session_id: int | None = None  # None: it has had none yet
    stopped_by: str = "stop"  # why its last generation ended, as in `Completion`
    room: int = 0  # tokens that its context had left when it ended
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
        is_open = record["finish_reason"] == KEPT
        turns = [Turn.of_record(turn) for turn in record["turns"]]
        names = ("version_first", "version_last", "num_begun", "version_begun", "env_metrics")
        as_then: dict[str, Any] = {name: record[name] for name in names if name in record}
        as_then |= {name: list(state[name]) for name in ("response_ids", "response_mask", "log_probs")}
        return cls(
            row,
            kept.get("prompt_ids", prompt_ids),
            seed,
            turns=turns,
            finish_reason="" if is_open else record["finish_reason"],
            num_old_turns=len(turns),
            contexts=list(record.get("contexts", ())),
            stopped_by=record.get("stopped_by", "stop"),
            room=record.get("room", 0),
            seconds=(record.get("env_seconds_init", 0.0), record.get("env_seconds_step", 0.0)),
            error=record.get("env_error"),
            kept_env=kept.get("env"),
            **as_then,
        )

    @property
    def num_tokens(self) -> int:
        """Length of the whole context, prompt included."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def context(self) -> list[int]:
        """The tokens that its next turn reads."""
        if self.contexts:
            return self.response_ids[self.contexts[-1] :]
        return self.prompt_ids + self.response_ids

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

    def begin_context(self, token_ids: Sequence[int]) -> None:
        """Appends another prompt, which the next turn reads in place of all before, in a new session."""
        self.contexts.append(len(self.response_ids))
        self.add_observation(token_ids)

    def mask(self) -> None:
        """None of its tokens may be learnt from."""
        self.response_mask = [0] * len(self.response_ids)
        self.log_probs = [0.0] * len(self.response_ids)

    def keep(self, begun: Partial, version: int) -> None:
        """Takes what the running turn has sampled, for a later step to go on from. `version`: the present."""
        if begun.token_ids:
            if not self.num_begun:
                self.version_begun = begun.version_first
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
            "stopped_by": self.stopped_by,
            "room": self.room,
            "version_first": self.version_first,
            "version_last": self.version_last,
            "num_begun": self.num_begun,
            "version_begun": self.version_begun,
            "prompt_text": prompt_text,
            "policy_text": join_turns(turn.text for turn in self.turns),
        }
        if self.contexts:
            record["contexts"] = self.contexts
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


@dataclass(eq=False)
class PendingStep:
    """A turn that its environment is at work on, or an environment that is being made.

    outcome: what comes of the future. due: the engine step at which that joins, with a fixed delay.
    """

    trajectory: Trajectory
    future: Future[Any]
    due: int
    outcome: Callable[[Future[Any]], BaseTextEnvStepOutput | Episode] = Future.result
