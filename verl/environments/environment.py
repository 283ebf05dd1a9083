"""The interface of an environment.

The names are SkyRL's, so that an environment written for SkyRL works with this base class.
docs/environments.md shows how to use it. The loop (`verl/agent/loop.py`) calls the environments, and
`executors.py` decides where they run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, get_args, get_type_hints

import numpy as np

from verl.utils.reward_score import is_score
from verl.utils.rows import row_max_turns
from verl.utils.text import is_encodable, joined_parts

EXECUTORS = ("inline", "thread", "process")  # where an environment may run
Message = dict[str, str]  # {"role": "user", "content": "..."}


class BaseTextEnvStepOutput(TypedDict):
    """The result of one action.

    Attributes:
        observations: The messages that the policy reads next. The list is empty when the episode is done.
        reward: The reward of this action. The trajectory's reward is the sum over its actions. None where the
            run's reward function or verifiers score.
        done: Whether the episode is over.
        metadata: Plain data, which is kept in the trajectory's record.
        postprocessed_action: A key of SkyRL's. It is refused unless it is None or the action itself, because
            training uses the ids that were sampled.
        action: The name of the action in the record; "step" by default.
        finish_reason: The finish reason of an episode that is done; "done" by default.
        is_new_context: Whether the observations are a whole conversation, which the policy reads in place of
            everything before it.
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
    """An action of `step_many` whose result is still to come.

    Attributes:
        action: The name of the action, as in `BaseTextEnvStepOutput`. It goes into the record at once.
        metadata: Plain data, as in `BaseTextEnvStepOutput`. It goes into the record at once, too.
        future: The future that the action waits for.
        output: A function that takes the future once it is done, and returns the step's output or raises.
    """

    action: str
    metadata: dict[str, Any]
    future: Future[Any]
    output: Callable[[Future[Any]], BaseTextEnvStepOutput]


class EpisodeFailed(Exception):
    """An error that ends an episode for a reason that is not the policy's."""

    reason = "env_failed"  # its finish_reason


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of a `ToolGroup` as a tool with the method's name."""
    vars(function)["is_tool"] = True
    return function


class ToolGroup:
    """A group of tools that belong together: the methods of a subclass that are marked with `@tool`."""

    def __init__(self, name: str) -> None:
        self.name = name
        tools = [attr for attr in dir(type(self)) if hasattr(getattr(type(self), attr), "is_tool")]
        self._tools = {attr: getattr(self, attr) for attr in tools}

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the tool with a name, or None if the group has no such tool."""
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool and return its result.

        Raises ValueError if the group has no tool with this name.
        """
        if name not in self._tools:
            raise ValueError(f"Found tool {name!r} in group {self.name!r}; expected {self.get_tool_names()}.")
        return self._tools[name](*args, **kwargs)


class EnvConfig(dict[str, Any]):
    """The settings of an environment: a dictionary whose values are attributes, too, as in SkyRL.

    Example: EnvConfig({"topk": 3}).topk == EnvConfig({"topk": 3})["topk"] == 3
    """

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            names = ", ".join(self) or "none"
            raise AttributeError(f"Found no {name!r} in env_config (it has: {names}); set it there.")
        value = self[name]
        return EnvConfig(value) if isinstance(value, Mapping) else value


def env_config_of(cls: Callable[..., Any], settings: Mapping[str, Any]) -> EnvConfig:
    """Return settings for an environment's class.

    Where the class says by a dataclass what its `env_config` is, as SkyRL's do, the dataclass's defaults
    stand for what the settings leave out.
    """
    defaults: dict[str, Any] = {}
    with suppress(NameError, TypeError, AttributeError):  # annotations of others may be anything
        annotation = get_type_hints(cls.__init__).get("env_config")
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and is_dataclass(kind):
                for field in fields(kind):
                    if field.default is not MISSING:
                        defaults[field.name] = field.default
    return EnvConfig({**defaults, **settings})


class BaseTextEnv:
    """An episode with one trajectory.

    Subclasses define `__init__(self, env_config=None, extras=None)` and `step`. If `step` is a coroutine
    function, `init`, `close` and `get_metrics` may be coroutine functions, too.
    """

    # Strings that end a turn where they appear, in addition to the end of sequence.
    stop: tuple[str, ...] = ()
    # Where `init` and `step` run with `environment.executor=auto`. "inline" is for microseconds of work,
    # "thread" for waiting for others, and "process" for computing or for calls that may hang, as a process
    # can be killed. A `step` that is a coroutine function runs in an event loop.
    runs: ClassVar[Literal["inline", "thread", "process"]] = "thread"
    # The most actions of an episode, if neither its row nor the configuration says (see `make_environment`).
    max_turns: int = 1
    # The text that closes each observation. Of an observation that is too long, the text before it is cut.
    observation_end: ClassVar[str] = ""
    # Whether the environment ends its episodes itself. Otherwise the loop ends them after `max_turns`.
    counts_turns: ClassVar[bool] = False
    # Whether the number of turns is all that it takes to go on with an unfinished episode.
    stateless: ClassVar[bool] = False
    # Modules of `verl.utils.extras` without which the environment can't work.
    needs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check_settings(cls, env_config: Mapping[str, Any]) -> None:
        """Raise ValueError if no episode can be played with these settings.

        This method is called once before a run starts.

        Args:
            env_config: The environment's block of `environment.env_config`.
        """

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.turns = 0  # actions so far, for the subclass to count
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages that the policy is shown first, and plain data about them.

        By default the messages are the row's prompt.
        """
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Take the policy's text of one turn and return its result.

        An exception ends the trajectory as "env_failed". The exception `verl.verifiers.CouldNotVerify` ends
        it as "unverified". In both cases the trajectory leaves the batch and is counted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def close(self) -> None:
        """Free what the episode holds.

        This method is called exactly once.
        """

    def get_metrics(self) -> dict[str, Any]:
        """Return figures of the episode, once it is over."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the mean of each number in many episodes' `get_metrics`.

        Other values are left out.
        """
        columns: dict[str, list[float]] = {}
        for name, value in ((name, row[name]) for row in metrics for name in row):
            if isinstance(value, int | float | np.number):
                columns.setdefault(name, []).append(float(value))
        return {name: float(np.mean(values)) for name, values in columns.items()}

    @classmethod
    def step_many(
        cls, envs: Sequence[Any], actions: Sequence[str]
    ) -> Sequence[BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput] | ActionUnderWay] | None:
        """Take one action in each of many environments, or return None to have `step` called for each.

        It is for classes that have a faster way for many environments, such as a batched request.
        """
        return None

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Give the environment its tools."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {
            tool_name: group.name for group in tool_groups for tool_name in group.get_tool_names()
        }

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Call a tool of a group and return its result.

        Raises ValueError if there is no group, or no tool in it, with the given name.
        """
        groups = {group.name: group for group in self.tool_groups}
        if tool_group_name not in groups:
            raise ValueError(f"Found tool group {tool_group_name!r}; expected one of {list(groups)}.")
        return groups[tool_group_name].execute_tool(tool_name, *tool_input)


def gold_answer(extras: Mapping[str, Any] | None) -> Any:
    """Return the row's right answer, which has SkyRL's name or verl's.

    Raises ValueError if the row has neither.
    """
    extras = extras or {}
    for spec in (extras.get("reward_spec"), extras.get("reward_model")):
        if isinstance(spec, Mapping) and spec.get("ground_truth") is not None:
            return spec["ground_truth"]
    names = "reward_spec.ground_truth or reward_model.ground_truth"
    raise ValueError(f"Found a row with the columns {sorted(extras)}; expected its right answer in {names}.")


def gold_text(extras: Mapping[str, Any] | None) -> str:
    """Return the row's right answer as text.

    Raises ValueError if the row has none, or one that is neither text nor a number.
    """
    gold = gold_answer(extras)
    is_number = isinstance(gold, Real) and not isinstance(gold, bool) and math.isfinite(gold)
    if not is_number and not (isinstance(gold, str) and gold.strip()):
        raise ValueError(f"Found the right answer {gold!r:.200}; expected text or a number.")
    # A whole number from a column of numbers may be a float.
    return str(int(gold)) if isinstance(gold, float) and gold.is_integer() else str(gold)


def check_stop(stop: Any) -> None:
    """Raise ValueError unless the strings that end a turn are a tuple or list of strings."""
    if not isinstance(stop, tuple | list) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"Found stop={stop!r}; expected a tuple of texts, such as ('</answer>',).")


def make_environment(cls: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Make an environment for one episode.

    If its `__init__` does not set `max_turns`, `max_turns` is taken from its extras.
    """
    env = cls(**kwargs)
    max_turns = row_max_turns(kwargs.get("extras") or {})
    if isinstance(env, BaseTextEnv) and "max_turns" not in vars(env) and max_turns is not None:
        env.max_turns = max_turns
    return env


def output_problem(output: Any, action: str) -> str | None:
    """Return what is wrong with the output of a `step`, or None if the episode can go on with it."""
    if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= output.keys():
        return f"step returned {output!r:.200}; expected a dictionary with observations, reward and done"
    if output.get("postprocessed_action") not in (None, action):
        return (
            "step returned another postprocessed_action than the action; only what was sampled is trained: "
            "let a wrong form cost reward instead"
        )
    reward = output["reward"]
    shown = output["observations"]
    are_messages = isinstance(shown, list | tuple) and all(
        isinstance(message, Mapping) and "content" in message for message in shown
    )
    if not output["done"] and not are_messages:
        return f"step returned observations={shown!r:.200}; expected a list of messages with role and content"
    for message in shown if are_messages else ():
        if (problem := content_problem(message)) is not None:
            return f"step returned {problem}"
    if reward is not None and not is_score(reward):
        return f"step returned reward={reward!r:.60}; expected a finite number that float32 holds, or None"
    return None


def content_problem(message: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content of a message of an environment, or None if it is text.

    A list of text parts is text.
    """
    content = joined_parts(message["content"])
    if not isinstance(content, str):
        return f"a message with the content {content!r:.200}; expected text, or a list of text parts"
    if not is_encodable(content):
        return f"a message with the content {content!r:.200}, with half of a letter; expected text"
    return None


def with_text(message: Mapping[str, Any]) -> Message:
    """Return a message of an environment with its text parts joined."""
    return {**message, "content": joined_parts(message["content"])}


def location_of(cls: Any, method: str) -> str:
    """Return where an environment's author has written a method, as " (file:line)", or ""."""
    code = getattr(getattr(cls, method, None), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
