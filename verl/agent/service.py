"""A loop over sessions that does not end. Trajectories are added and taken while others run.

    add -> [pending] -> [running: sessions, actions under way] -> take_finished
                             |  load_weights: between two steps, or when no turn is under way
                             +-> continuations: copies of what runs, for a checkpoint

One thread owns the loop, as it owns the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from verl.agent.agent import EnvironmentAgent
from verl.agent.episode import Episode, EpisodeEvent
from verl.agent.loop import TrajectoryLoop
from verl.agent.trajectory import KEPT, Trajectory
from verl.environments.executors import EnvironmentHandle
from verl.sessions.engine_contract import Partial


class TrajectoryService(TrajectoryLoop):
    """The loop of a rollout process, to which episodes are added while it runs.

    It begins without episodes. Each one has its own `params`, and its trajectory a `row` of its own.
    """

    def __init__(self, agent: EnvironmentAgent) -> None:
        super().__init__(agent, agent.sampling_params({}), [])
        self._waiting_weights: Callable[[], None] | None = None  # called when no turn is under way
        # turns that wait for the weights
        self._held_turns: list[tuple[Episode, Sequence[int] | None]] = []

    @property
    def is_idle(self) -> bool:
        return not self.live

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add episodes to the loop and start as many as the limit allows.

        A trajectory with a finish_reason ended before a checkpoint. It is only handed out again.
        """
        self.live |= {episode.trajectory.row: episode for episode in episodes}
        self.pending.extend(episode for episode in episodes if not episode.trajectory.finish_reason)
        self._start_pending()

    def take_finished(self) -> list[Trajectory]:
        """Remove and return the trajectories that ended since the last call.

        Their environments are closed.
        """
        if len(self.live) == self.num_in_flight + len(self.pending):
            return []
        self.environments.wait_until_closed()
        self.note_ends()
        trajectories = [episode.trajectory for episode in self.live.values()]
        finished = [trajectory for trajectory in trajectories if trajectory.finish_reason]
        for trajectory in finished:
            del self.live[trajectory.row]
        return finished

    def advance(self, news: Future[Any] | None = None) -> None:
        if self._waiting_weights is not None and not self.engine.has_runnable:
            self._take_weights()
        if self.engine.has_runnable or self.waiting:
            super().advance(news)

    def cancel(self, rows: Collection[int]) -> None:
        """End episodes that nobody waits for any more. `take_finished` does not return them."""
        for row in rows:
            episode = self.live.pop(row, None)
            if episode is None or episode.trajectory.finish_reason:
                continue
            if episode in self.pending:
                self.pending.remove(episode)
                self.num_in_flight += 1  # `_finish` subtracts it again
            under_way = self.waiting.pop(row, None)
            if under_way is not None and not under_way.future.cancel():
                under_way.future.add_done_callback(partial(self._close_late, episode))
            self._held_turns = [turn for turn in self._held_turns if turn[0] is not episode]
            self._finish(episode, "cut")

    def load_weights(self, load: Callable[[], None], turns_end_first: bool) -> None:
        """Give the engine weights by calling `load`, now or when the turns under way have ended.

        No other turn begins before. An earlier call that still waits is dropped.

        Args:
            load: Gives the engine the weights.
            turns_end_first: Whether `load` waits until the turns under way have ended.
        """
        self._waiting_weights = load
        if not turns_end_first or not self.engine.has_runnable:
            self._take_weights()

    def _take_weights(self) -> None:
        load = self._waiting_weights
        self._waiting_weights = None
        assert load is not None
        load()
        held_turns = self._held_turns
        self._held_turns = []
        for episode, token_ids in held_turns:
            super()._start_turn(episode, token_ids)

    def _start_turn(self, episode: Episode, token_ids: Sequence[int] | None = None) -> None:
        if self._waiting_weights is None:
            super()._start_turn(episode, token_ids)
        else:
            episode.handle_event(EpisodeEvent.TURN_HELD)
            self._held_turns.append((episode, token_ids))

    def snapshot(self) -> list[Trajectory]:
        """Return all trajectories as they stand, for a checkpoint.

        Those that run are copied, and the copies end as "kept". A trajectory whose environment has a state of
        its own begins anew.
        """
        observations = {episode.trajectory.row: token_ids for episode, token_ids in self._held_turns}
        copies = []
        for episode in self.live.values():
            trajectory = episode.trajectory
            if trajectory.finish_reason:
                copies.append(trajectory)
                continue
            env_class = trajectory.env_class
            if episode.handle is not None and not self.environments[env_class].stateless:
                copy = Trajectory(trajectory.row, trajectory.prompt_ids, trajectory.seed, env_class=env_class)
            else:
                copy = trajectory.copy()
                observation = observations.get(trajectory.row)
                if observation is not None:
                    # An observation without room is not added, and is asked for again.
                    if copy.num_tokens + len(observation) < self.max_context:
                        copy.add_observation(observation)
                elif episode.session_id is not None and episode.handle is not None:
                    copy.keep(self._settled(episode.session_id, episode.handle), self.engine.version)
            copy.finish_reason = KEPT
            copies.append(copy)
        return copies

    def _settled(self, session_id: int, handle: EnvironmentHandle) -> Partial:
        """Return what a session's running turn has sampled, up to where a stop string may have begun."""
        begun = self.engine.partial(session_id)
        stop = self.codec.stop(handle.stop)
        length = len(begun.token_ids) if stop is None else stop.settled_length(begun.token_ids)
        return Partial(begun.token_ids[:length], begun.log_probs[:length], begun.version_first)
