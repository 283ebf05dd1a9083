"""A trajectory: its tokens, turns and scores, which are kept when it has ended.

    prompt | policy's tokens | observation | policy's tokens | ...      response = all after the prompt
             mask 1 ... 1      0 ... 0       1 ... 1

Ids are only ever appended. What lives only while a trajectory runs is its `Episode` (verl/agent/episode.py).
A trajectory that is kept for the next step travels as its row of the batch and its record (see
`continuations` of verl/trainer/ppo/collection.py), and `Trajectory.continued` rebuilds it from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.environments.registry import SEARCH
from verl.sessions.engine_contract import Partial
from verl.utils.reward_score.qa_em import join_turns

KEPT = "kept"  # finish_reason of a copy that goes on when a run resumes


@dataclass(frozen=True)
class AgentConfig:
    """The lengths, limits and sampling of trajectories.

    Lengths are in tokens, as in Search-R1. A trajectory that can't go on within them ends with "length".

    Attributes:
        max_turns: Maximum number of actions of an episode whose row does not set one. After that many
            searches comes one last turn, whose search is no longer made.
        max_start_length: Maximum length of a prompt. A longer one keeps its last tokens.
        max_prompt_length: Maximum length of a whole context.
        max_response_length: Maximum number of tokens that a turn samples.
        max_obs_length: Maximum length of an observation.
        search_delay_steps: An observation joins exactly this many engine steps after its action was taken.
            That makes the engine's batches, and with them float rounding, repeatable. None means that it
            joins as soon as it arrives.
        max_in_flight: Maximum number of trajectories under way at a time, including those that wait. None
            means no limit.
        straggler_factor: Training batches don't wait for groups later than this many times the median (see
            `stragglers.py`). Time is measured in seconds, or in engine steps if `search_delay_steps` is set.
            None means that batches wait.
        temperature: Used, like `top_p`, `top_k` and `min_p`, where a batch's `meta_info` does not say.
        top_p: See `SamplingParams`.
        top_k: See `SamplingParams`.
        min_p: See `SamplingParams`.
        eos_token_ids: Ids that end a turn, besides the tokenizer's end of sequence (`generation_eos_ids`).
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
        minimums = dict.fromkeys(
            ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"), 1
        )
        minimums |= {"max_turns": 0, "search_delay_steps": 0, "max_in_flight": 1, "straggler_factor": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ValueError(f"{name}: found {value}, expected {minimum} or more")
        if self.max_start_length >= self.max_prompt_length:
            raise ValueError(
                f"max_start_length: found {self.max_start_length}, expected less than max_prompt_length "
                f"({self.max_prompt_length}), which bounds the prompt and everything after it"
            )


def generation_eos_ids(model: str | None) -> tuple[int, ...]:
    """Return the ids that end a turn according to the model's generation_config.json.

    Returns () if there is no model or no such file.
    """
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
    """One generation of the policy and the environment's reply to it.

    Spans are positions in the response, with an exclusive end.

    Attributes:
        action: The environment's name for the action, or "step" if it has no names. Searches use "search",
            "answer", "invalid" (the policy got a hint) and "none" (the last turn had no action).
        text: The text that the policy wrote.
        start: Start of the span that was sampled.
        end: End of the span that was sampled.
        error: The reason why the environment could not take the turn.
        obs_start: Start of the observation's span, or None if nothing was appended.
        obs_end: End of the observation's span, or None if nothing was appended.
        reward: The environment's reward for the action.
        version_first: Version of the weights that sampled the turn's first token.
        details: Plain data that the environment says of the turn. The record has them beside the other
            fields. For searches: query, documents and search_seconds.
    """

    action: str
    text: str
    start: int
    end: int
    error: str | None = None
    obs_start: int | None = None
    obs_end: int | None = None
    reward: float | None = None
    version_first: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Turn:
        """Rebuild a turn from its record."""
        fields = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        return cls(**fields, details={name: record[name] for name in record if name not in fields})

    def record(self, is_search: bool) -> dict[str, Any]:
        """Return the turn as a plain dict."""
        record = vars(self) | self.details | vars(self)  # details can't take the place of a span
        del record["details"]
        if is_search:  # a search has a reward for the trajectory, none for a turn
            del record["reward"]
        return record


@dataclass
class Trajectory:
    """The tokens, turns and scores of one row of a batch.

    The three response lists have one entry per response token.

    Attributes:
        row: Its row in the batch, or its number in a `TrajectoryService`.
        prompt_ids: The tokens of its prompt.
        seed: Its sampling seed.
        response_ids: The tokens after the prompt.
        response_mask: 1 for a token that the policy sampled, 0 for any other.
        log_probs: The log-probability of each token that the policy sampled, 0 for any other.
        turns: Its turns that have ended.
        finish_reason: "answer", "done", "eos", "length", "max_turns", "search_failed", "env_failed",
            "unverified", "cut" or "kept". "" while it runs.
        version_first: The policy version of the first sampled token.
        version_last: The policy version of the last sampled token.
        num_begun: The number of last response tokens that belong to a turn that has not ended.
        version_begun: The policy version of the first of these tokens.
        num_old_turns: The number of turns that it had in a checkpoint, or None if it does not come from one.
        contexts: The positions in the response at which a context begins.
        env_class: The name of its environment.
        stopped_by: The reason why its last generation ended, as in `Completion`.
        room: The number of tokens that its context had left when it ended.
        seconds: The seconds in its environment's init, and in all its steps.
        env_metrics: The metrics of its environment.
        error: The reason why its environment failed.

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
    finish_reason: str = ""
    version_first: int | None = None
    version_last: int | None = None
    num_begun: int = 0
    version_begun: int | None = None
    num_old_turns: int | None = None
    contexts: list[int] = field(default_factory=list)
    env_class: str = SEARCH
    stopped_by: str = "stop"
    room: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    env_metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def continued(cls, row: int, prompt_ids: list[int], seed: int, state: Mapping[str, Any]) -> Trajectory:
        """Rebuild a trajectory of a checkpoint as it was, finished or not.

        Args:
            row: Its row in the present batch.
            prompt_ids: Its prompt.
            seed: Its sampling seed.
            state: Its `response_ids`, `response_mask` and `log_probs` without padding, and its `record`.
        """
        record = state["record"]
        is_open = record["finish_reason"] == KEPT
        turns = [Turn.of_record(turn) for turn in record["turns"]]
        names = ("version_first", "version_last", "num_begun", "version_begun", "env_metrics")
        restored: dict[str, Any] = {name: record[name] for name in names if name in record}
        restored |= {name: list(state[name]) for name in ("response_ids", "response_mask", "log_probs")}
        return cls(
            row,
            prompt_ids,
            seed,
            turns=turns,
            finish_reason="" if is_open else record["finish_reason"],
            num_old_turns=len(turns),
            contexts=list(record.get("contexts", ())),
            stopped_by=record.get("stopped_by", "stop"),
            room=record.get("room", 0),
            seconds=(record.get("env_seconds_init", 0.0), record.get("env_seconds_step", 0.0)),
            error=record.get("env_error"),
            **restored,
        )

    def copy(self) -> Trajectory:
        """Return a copy that does not grow with this trajectory."""
        return replace(
            self,
            response_ids=list(self.response_ids),
            response_mask=list(self.response_mask),
            log_probs=list(self.log_probs),
            turns=[replace(turn) for turn in self.turns],
            contexts=list(self.contexts),
        )

    @property
    def num_tokens(self) -> int:
        """Return the length of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def context(self) -> list[int]:
        """Return the tokens that the next turn reads."""
        if self.contexts:
            return self.response_ids[self.contexts[-1] :]
        return self.prompt_ids + self.response_ids

    @property
    def is_at_environment(self) -> bool:
        """Return whether the environment has the last turn, or had it when the trajectory was kept."""
        return bool(self.turns) and self.turns[-1].obs_start is None and not self.num_begun

    def add_sampled(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> tuple[int, int]:
        """Append what the policy sampled to the end of its turn.

        Returns the turn's span in the response.
        """
        start = len(self.response_ids) - self.num_begun
        self.num_begun = 0
        self.response_ids += token_ids
        self.response_mask += [1] * len(token_ids)
        self.log_probs += log_probs
        return start, len(self.response_ids)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, and note their span in the last turn."""
        turn = self.turns[-1]
        turn.obs_start = len(self.response_ids)
        self.response_ids += token_ids
        self.response_mask += [0] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        turn.obs_end = len(self.response_ids)

    def begin_context(self, token_ids: Sequence[int]) -> None:
        """Append another prompt, which the next turn reads in place of all before, in a new session."""
        self.contexts.append(len(self.response_ids))
        self.add_observation(token_ids)

    def mask_all(self) -> None:
        """Exclude all tokens from training."""
        self.response_mask = [0] * len(self.response_ids)
        self.log_probs = [0.0] * len(self.response_ids)

    def keep(self, begun: Partial, version: int) -> None:
        """Append what the running turn has sampled, so that a later step can go on from there.

        Args:
            begun: The tokens of the running turn.
            version: The present version of the weights.
        """
        if begun.token_ids:
            if not self.num_begun:
                self.version_begun = begun.version_first
            start, end = self.add_sampled(begun.token_ids, begun.log_probs)
            self.num_begun = end - start
            self.version_first = begun.version_first if self.version_first is None else self.version_first
            self.version_last = version

    def record(self, prompt_text: str) -> dict[str, Any]:
        """Return the plain dict that goes into the batch under `trajectory`.

        If the trajectory is kept with its environment, `EnvironmentAgent.batch` adds the environment.
        """
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
                "env_reward": sum(rewards) if rewards else None,  # None if the run's reward function scores
                "env_metrics": self.env_metrics,
                "env_error": self.error,
                "env_seconds_init": self.seconds[0],
                "env_seconds_step": self.seconds[1],
            }
        return record
