"""The interface of an environment, with SkyRL's names: one of theirs works after one changed import.

    env = EnvClass(env_config=..., extras=row)       extras: all columns of the row but its prompt
    messages, info = env.init(prompt)                what the policy is shown first
    output = env.step(text of one turn)              observations, reward, whether it is over
    env.get_metrics(); env.close()                   once, at the end, whatever happened

The loop (`verl/agent/loop.py`) calls these; where they run, `executors.py` decides. `env_class` in a row or
in `environment.env_class` names an environment of `registry.py`, or any class as package.module:Class. An
object with `init`, `step` and `close` is enough: it need not derive from `BaseTextEnv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np

Message = dict[str, str]  # {"role": "user", "content": "..."}


class BaseTextEnvStepOutput(TypedDict):
    """What one action brought.

    observations: messages that the policy reads next; [] when done. reward: of this action; the rewards of
    all actions are summed to the trajectory's; None where the run's reward function or verifiers score.
    done: the episode is over. metadata: plain data, kept in the trajectory's record. postprocessed_action:
    SkyRL's; refused unless it is None or the action itself, as the ids that were sampled are trained.
    action: what the record calls it ("step"). finish_reason: as what a done episode has ended ("done").
    """

    observations: list[Message]
    reward: float | None
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]
    action: NotRequired[str]
    finish_reason: NotRequired[str]


class ActionUnderWay(Future[BaseTextEnvStepOutput]):
    """A Future of `step_many` that tells the record at once what the action is: `action` and `metadata` as in
    the output.
    """

    def __init__(self, action: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.action, self.metadata = action, metadata


class EpisodeFailed(Exception):
    """Ends an episode for a reason that is not the policy's. reason: its finish_reason."""

    reason: ClassVar[str] = "env_failed"


class BaseTextEnv:
    """An episode with one trajectory. Subclasses define `__init__(self, env_config=None, extras=None)` and
    `step`.

    Attributes of the class:
        stop: strings that end a turn where they appear, beside the end of sequence.
        runs: where `init` and `step` run with `environment.executor=auto`: "inline" (cheap: microseconds),
            "thread" (waits for others), "process" (computes, or may hang: can be killed).
            Where `step` is a coroutine function (`async def`; the other methods may be), it is an event loop,
            where any number of episodes wait at once.
        observation_end: closing text of its observations; of one that is too long what stands before goes.
        counts_turns: it ends its episodes itself; else they end after `max_turns` actions.
        stateless: an episode is known by its number of turns, so that an unfinished one can be gone on with.

    Attributes:
        turns: actions so far, for the subclass to count. max_turns: most actions of an episode; the loop sets
            it from the row's `max_turns` or from the configuration before `init` where the class leaves it.
    """

    stop: tuple[str, ...] = ()
    runs: ClassVar[Literal["inline", "thread", "process"]] = "thread"
    max_turns: int = 1
    observation_end: ClassVar[str] = ""
    counts_turns: ClassVar[bool] = False
    stateless: ClassVar[bool] = False

    def __init__(self) -> None:
        self.turns = 0
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The messages that the policy is shown first, and plain data about them; by default the row's."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Takes the policy's text of one turn. An exception ends the trajectory as "env_failed": it leaves
        the batch and is counted. `verl.verifiers.CouldNotVerify` ends it as "unverified" in the same way.
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
        names = dict.fromkeys(name for row in metrics for name in row)
        columns = {name: [row[name] for row in metrics if name in row] for name in names}
        return {
            name: float(np.mean(values))
            for name, values in columns.items()
            if all(isinstance(value, int | float | np.number) for value in values)
        }

    @classmethod
    def step_many(
        cls, envs: Sequence[Any], actions: Sequence[str]
    ) -> list[BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput]] | None:
        """Takes the actions of several episodes at once, for classes that have a faster way than one by one
        (a batched request); None: there is none, and the executor calls `step` of each.
        """
        return None

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Gives the environment its tools."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {
            name: group.name for group in self.tool_groups for name in group.get_tool_names()
        }

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Calls a tool of a group. ValueError: there is none of these names."""
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        names = [group.name for group in self.tool_groups]
        raise ValueError(f"Found tool group {tool_group_name!r}; expected one of {names}.")


def gold_answer(extras: Mapping[str, Any] | None) -> Any:
    """The row's right answer: `ground_truth` of its `reward_spec` (SkyRL's name) or `reward_model` (verl's).

    Raises:
        ValueError: the row has neither.
    """
    extras = extras or {}
    for name in ("reward_spec", "reward_model"):
        if isinstance(extras.get(name), Mapping) and extras[name].get("ground_truth") is not None:
            return extras[name]["ground_truth"]
    raise ValueError(
        f"Found a row with the columns {sorted(extras)}; its environment expects the right answer in "
        f"reward_spec.ground_truth or reward_model.ground_truth."
    )


def turns_of(extras: Mapping[str, Any] | None, default: int) -> int:
    """The row's `max_turns`, as a column or in its extra_info."""
    row = extras or {}
    return int(row.get("max_turns") or (row.get("extra_info") or {}).get("max_turns") or default)


def make_environment(cls: Callable[..., Any], kwargs: Mapping[str, Any], max_turns: int) -> Any:
    """An environment for one episode of at most `max_turns` actions."""
    env = cls(**kwargs)
    if isinstance(env, BaseTextEnv) and "max_turns" not in vars(env):
        env.max_turns = max_turns
    return env


class tool:  # a decorator, hence its name
    """Marks a method of a `ToolGroup` as a tool of that name."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name, self.__doc__ = func, func.__name__, func.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Tools that belong together: the methods of a subclass with `@tool`."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = ((attr, getattr(type(self), attr, None)) for attr in dir(type(self)))
        self._tools = {value.name: getattr(self, attr) for attr, value in found if isinstance(value, tool)}

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> Mapping[str, str]:
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a tool. ValueError: there is none of this name."""
        if name not in self._tools:
            raise ValueError(f"Found tool {name!r} in group {self.name!r}; expected {self.get_tool_names()}.")
        return self._tools[name](*args, **kwargs)
