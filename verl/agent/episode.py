"""An episode: what lives while a trajectory runs, its states, and the events that move it on.

    row of a batch -> Episode(trajectory, what its environment is made from) -> TrajectoryLoop -> Trajectory

When the episode has ended, its trajectory is kept and nothing else. An episode is in one of these states
(`EpisodeState`), and `TrajectoryLoop` tells it what has happened (`EpisodeEvent`):

    PENDING --ADMITTED--> OPENING --TURN_STARTED--> DECODING --TURN_ENDED--> STEP_DUE
                                                       ^                        |
                                                  TURN_STARTED             STEP_STARTED
                                                       |                        v
                                                       +--------------------- STEPPING

    OPENING --TURN_RESTORED--> STEP_DUE           it comes from a checkpoint, with a turn at its environment
    OPENING or STEPPING --TURN_HELD--> HELD --TURN_STARTED--> DECODING      new weights come first
    every state --FINISHED--> ENDED

`TRANSITIONS` is this drawing as a table. An event that it does not have is an error of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from verl.agent.trajectory import Trajectory
from verl.environments.environment import BaseTextEnvStepOutput, Message
from verl.environments.executors import EnvironmentHandle
from verl.sessions.engine_contract import SamplingParams


class EpisodeState(Enum):
    """The state of an episode: what it waits for."""

    PENDING = auto()  # it waits for room among `max_in_flight` episodes
    OPENING = auto()  # its environment is being made
    DECODING = auto()  # the engine samples its turn
    STEP_DUE = auto()  # its turn has ended, and its environment has still to take it
    STEPPING = auto()  # its environment is at work on the turn
    HELD = auto()  # its next turn waits for new weights; only in a `TrajectoryService`
    ENDED = auto()  # its trajectory has a finish_reason


class EpisodeEvent(Enum):
    """An event that moves an episode from one state to the next.

    A `LoopEvent` is something else: it tells a caller's `on_event` what to show.
    """

    ADMITTED = auto()  # there is room: the loop asks for its environment
    TURN_STARTED = auto()  # its environment is ready, or has replied: a session of the engine goes on
    TURN_ENDED = auto()  # the engine has sampled the last token of the turn
    TURN_RESTORED = auto()  # it comes from a checkpoint with a turn that its environment has not taken
    STEP_STARTED = auto()  # the turn was passed to its environment
    TURN_HELD = auto()  # its environment is ready, or has replied, but new weights come first
    FINISHED = auto()  # it is done, has no room, failed, was cut, or was cancelled


TRANSITIONS = {
    (EpisodeState.PENDING, EpisodeEvent.ADMITTED): EpisodeState.OPENING,
    (EpisodeState.OPENING, EpisodeEvent.TURN_STARTED): EpisodeState.DECODING,
    (EpisodeState.OPENING, EpisodeEvent.TURN_RESTORED): EpisodeState.STEP_DUE,
    (EpisodeState.OPENING, EpisodeEvent.TURN_HELD): EpisodeState.HELD,
    (EpisodeState.DECODING, EpisodeEvent.TURN_ENDED): EpisodeState.STEP_DUE,
    (EpisodeState.STEP_DUE, EpisodeEvent.STEP_STARTED): EpisodeState.STEPPING,
    (EpisodeState.STEPPING, EpisodeEvent.TURN_STARTED): EpisodeState.DECODING,
    (EpisodeState.STEPPING, EpisodeEvent.TURN_HELD): EpisodeState.HELD,
    (EpisodeState.HELD, EpisodeEvent.TURN_STARTED): EpisodeState.DECODING,
}
TRANSITIONS |= {
    (state, EpisodeEvent.FINISHED): EpisodeState.ENDED
    for state in EpisodeState
    if state is not EpisodeState.ENDED
}


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
        state: The state. `handle_event` alone changes it.
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
    state: EpisodeState = field(init=False)

    def __post_init__(self) -> None:
        has_ended = bool(self.trajectory.finish_reason)
        self.state = EpisodeState.ENDED if has_ended else EpisodeState.PENDING

    def handle_event(self, event: EpisodeEvent) -> None:
        """Move to the state that an event leads to.

        Raises RuntimeError if the event can't happen in the present state.
        """
        if (self.state, event) not in TRANSITIONS:
            raise RuntimeError(f"{event} can't happen to an episode in {self.state}")
        self.state = TRANSITIONS[self.state, event]


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
