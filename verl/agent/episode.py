"""An episode: what lives while a trajectory runs.

    row of a batch -> Episode(trajectory, what its environment is made from) -> TrajectoryLoop -> Trajectory

When the episode has ended, its trajectory is kept and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.agent.trajectory import Trajectory
from verl.environments.environment import BaseTextEnvStepOutput, Message
from verl.environments.executors import EnvironmentHandle
from verl.sessions.engine_contract import SamplingParams


@dataclass(eq=False)
class Episode:
    """The run of one trajectory in its environment.

    Attributes:
        trajectory: The trajectory, which grows while the episode runs and is kept afterwards.
        max_turns: The maximum number of actions.
        extras: The columns of its row, for its environment.
        messages: Its prompt, for its environment.
        params: The sampling of its turns. None means that of the loop.
        handle: Its environment, from when it is ready until it is closed.
        session_id: Its session in the engine, from its first turn on.
        drawn_before: The number of tokens that it had sampled when its session began. The k-th token of a
            session uses the random number (seed, drawn_before + k).
        num_chars_shown: The number of characters of its running turn that `on_event` was already given.
    """

    trajectory: Trajectory
    max_turns: int
    extras: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    params: SamplingParams | None = None
    handle: EnvironmentHandle | None = None
    session_id: int | None = None
    drawn_before: int = 0
    num_chars_shown: int = 0


@dataclass(eq=False)
class PendingWork:
    """A turn that its environment is at work on, or an environment that is being made.

    Attributes:
        episode: The episode that waits.
        future: The work under way.
        due: The engine step at which the outcome joins, with a fixed delay.
        outcome: Function that returns the outcome of the future when it is done.
    """

    episode: Episode
    future: Future[Any]
    due: int
    outcome: Callable[[Future[Any]], BaseTextEnvStepOutput | EnvironmentHandle] = Future.result
