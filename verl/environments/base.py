"""The interface of an environment, with SkyRL's names: one of theirs works with this base class.

docs/environments.md shows how it is used. The loop (`verl/agent/loop.py`) calls it; where, `executors.py`
decides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np

HOW = ("inline", "thread", "process")  # where an environment may run
Message = dict[str, str]  # {"role": "user", "content": "..."}


class BaseTextEnvStepOutput(TypedDict):
    """What one action brought.

    observations: messages that the policy reads next; [] when done. reward: of this action; the rewards of
    all actions are summed to the trajectory's; None where the run's reward function or verifiers score.
    done: the episode is over. metadata: plain data, kept in the trajectory's record. postprocessed_action:
    SkyRL's; refused unless it is None or the action itself, as the ids that were sampled are trained.
    action: what the record calls it ("step"). finish_reason: as what a done episode has ended ("done").
    is_new_context: the observations are a whole conversation, which the policy reads in place of all before.
    """

    observations: list[Message]
    reward: float | None
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]
    action: NotRequired[str]
    finish_reason: NotRequired[str]
    is_new_context: NotRequired[bool]


@dataclass(frozen=True)
class ActionUnderWay:
    """An action of `step_many` that waits for `future`: what the record says of it at once, `action` and
    `metadata` as in the output, and what makes the output of the future when that is done (or raises).
    """

    action: str
    metadata: dict[str, Any]
    future: Future[Any]
    output: Callable[[Future[Any]], BaseTextEnvStepOutput]


class EpisodeFailed(Exception):
    """Ends an episode for a reason that is not the policy's."""

    reason = "env_failed"  # its finish_reason


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method of a `ToolGroup` as a tool of its name."""
    vars(function)["is_tool"] = True
    return function


class ToolGroup:
    """Tools that belong together: the methods of a subclass with `@tool`."""

    def __init__(self, name: str) -> None:
        self.name = name
        tools = [attr for attr in dir(type(self)) if hasattr(getattr(type(self), attr), "is_tool")]
        self._tools = {attr: getattr(self, attr) for attr in tools}

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """None: there is none of this name."""
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a tool. ValueError: there is none of this name."""
        if name not in self._tools:
            raise ValueError(f"Found tool {name!r} in group {self.name!r}; expected {self.get_tool_names()}.")
        return self._tools[name](*args, **kwargs)


class BaseTextEnv:
    """An episode with one trajectory. Subclasses define `__init__(self, env_config=None, extras=None)` and
    `step`; if `step` is a coroutine function, `init`, `close` and `get_metrics` may be, too.
    """

    # Strings that end a turn where they appear, beside the end of sequence.
    stop: tuple[str, ...] = ()
    # Where `init` and `step` run with `environment.executor=auto`: "inline" (cheap: microseconds), "thread"
    # (waits for others), "process" (computes, or may hang: can be killed); a coroutine in an event loop.
    runs: ClassVar[Literal["inline", "thread", "process"]] = "thread"
    # Most actions of an episode, where neither its row nor the configuration says (see `make_environment`).
    max_turns: int = 1
    # Closing text of its observations: of one that is too long what stands before is cut.
    observation_end: ClassVar[str] = ""
    counts_turns: ClassVar[bool] = False  # it ends its episodes itself, not the loop after `max_turns`
    stateless: ClassVar[bool] = False  # to go on with an unfinished episode its number of turns is enough

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.turns = 0  # actions so far, for the subclass to count
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The messages that the policy is shown first, by default the row's, and plain data about them."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Takes the policy's text of one turn. An exception ends the trajectory as "env_failed", and
        `verl.verifiers.CouldNotVerify` as "unverified": it leaves the batch and is counted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def close(self) -> None:
        """Frees what the episode holds. Called exactly once."""

    def get_metrics(self) -> dict[str, Any]:
        """Figures of the episode, once it is over."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Of many episodes' `get_metrics`: the mean of each number; all else is left out."""
        columns: dict[str, list[float]] = {}
        for name, value in ((name, row[name]) for row in metrics for name in row):
            if isinstance(value, int | float | np.number):
                columns.setdefault(name, []).append(float(value))
        return {name: float(np.mean(values)) for name, values in columns.items()}

    @classmethod
    def step_many(
        cls, envs: Sequence[Any], actions: Sequence[str]
    ) -> Sequence[BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | ActionUnderWay] | None:
        """For classes that have a faster way for many than `step` of each (a batched request); else None."""
        return None

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Gives the environment its tools."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {name: each.name for each in tool_groups for name in each.get_tool_names()}

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Calls a tool of a group. ValueError: there is none of these names."""
        groups = {group.name: group for group in self.tool_groups}
        if tool_group_name not in groups:
            raise ValueError(f"Found tool group {tool_group_name!r}; expected one of {list(groups)}.")
        return groups[tool_group_name].execute_tool(tool_name, *tool_input)


def gold_answer(extras: Mapping[str, Any] | None) -> Any:
    """The row's right answer, by SkyRL's name or by verl's. ValueError: it has neither."""
    extras = extras or {}
    for spec in (extras.get("reward_spec"), extras.get("reward_model")):
        if isinstance(spec, Mapping) and spec.get("ground_truth") is not None:
            return spec["ground_truth"]
    names = "reward_spec.ground_truth or reward_model.ground_truth"
    raise ValueError(f"Found a row with the columns {sorted(extras)}; expected its right answer in {names}.")


def row_max_turns(row: Mapping[str, Any]) -> int | None:
    """`max_turns` of a row, or of its extra_info; None: it says nothing."""
    for columns in (row, row.get("extra_info")):
        value = columns.get("max_turns") if isinstance(columns, Mapping) else None
        if value is not None and value == value:  # not the NaN of an empty cell
            try:
                number = int(value)
            except (TypeError, ValueError):
                number = -1
            if number < 0 or (isinstance(value, float) and number != value):
                raise ValueError(f"Found max_turns={value!r} in a row; expected a whole number.")
            return number
    return None


def check_stop(stop: Any) -> None:
    """ValueError: strings that end a turn are given as one string, or are no strings."""
    if not isinstance(stop, tuple | list) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"Found stop={stop!r}; expected a tuple of texts, such as ('</answer>',).")


def make_environment(cls: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """An environment for one episode; where its `__init__` sets no `max_turns`, its extras do."""
    env = cls(**kwargs)
    max_turns = row_max_turns(kwargs.get("extras") or {})
    if isinstance(env, BaseTextEnv) and "max_turns" not in vars(env) and max_turns is not None:
        env.max_turns = max_turns
    return env


def mistake_of(output: Any, action: str) -> str | None:
    """Why what a `step` returned can't be gone on with; None: it can."""
    if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= output.keys():
        return f"step returned {output!r:.200}; expected a dictionary with observations, reward and done"
    if output.get("postprocessed_action") not in (None, action):
        return (
            "step returned another postprocessed_action than the action; only what was sampled is trained: "
            "let a wrong form cost reward instead"
        )
    reward = output["reward"]
    said = output["observations"]
    is_said = isinstance(said, list | tuple) and all(
        isinstance(message, Mapping) and "content" in message for message in said
    )
    if not output["done"] and not is_said:
        return f"step returned observations={said!r:.200}; expected a list of messages with role and content"
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        return f"step returned reward={reward!r}; expected a finite number, or None"
    return None
