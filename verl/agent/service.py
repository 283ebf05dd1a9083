"""A loop over sessions that does not end. Trajectories are added and taken while others run.

    add -> [pending] -> [running: sessions, actions under way] -> take_finished
                             |  load_weights: between two steps, or when no turn is under way
                             +-> continuations: copies of what runs, for a checkpoint

One thread owns the loop, as it owns the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from verl.agent.agent import EnvironmentAgent
from verl.agent.loop import TrajectoryLoop
from verl.agent.trajectory import KEPT, Trajectory


class TrajectoryService(TrajectoryLoop):
    """The loop of a rollout process, to which trajectories are added while it runs.

    It begins without trajectories. Each one has a `row` of its own and its own `params`.
    """

    def __init__(self, agent: EnvironmentAgent) -> None:
        super().__init__(agent, agent.sampling_params({}), [])
        self._waiting_weights: Callable[[], None] | None = None  # called when no turn is under way
        # turns that wait for the weights
        self._held_turns: list[tuple[Trajectory, Sequence[int] | None]] = []

    @property
    def is_idle(self) -> bool:
        return not self.live

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add trajectories to the loop and start as many as the limit allows.

        A trajectory with a finish_reason ended before a checkpoint. It is only handed out again.
        """
        self.live |= {trajectory.row: trajectory for trajectory in trajectories}
        self.pending.extend(trajectory for trajectory in trajectories if not trajectory.finish_reason)
        self._start_pending()

    def take_finished(self) -> list[Trajectory]:
        """Remove and return the trajectories that ended since the last call.

        Their environments are closed.
        """
        if len(self.live) == self.num_in_flight + len(self.pending):
            return []
        self.environments.wait_for_ends()
        self.note_ends()
        finished = [trajectory for trajectory in self.live.values() if trajectory.finish_reason]
        for trajectory in finished:
            del self.live[trajectory.row]
        return finished

    def advance(self, news: Future[Any] | None = None) -> None:
        if self._waiting_weights is not None and not self.engine.has_runnable:
            self._take_weights()
        if self.engine.has_runnable or self.waiting:
            super().advance(news)

    def cancel(self, rows: Collection[int]) -> None:
        """End trajectories that nobody waits for any more. `take_finished` does not return them."""
        for trajectory in [self.live.pop(row) for row in rows if row in self.live]:
            if trajectory.finish_reason:
                continue
            if trajectory in self.pending:
                self.pending.remove(trajectory)
                self.num_in_flight += 1  # `_finish` subtracts it again
            under_way = self.waiting.pop(trajectory.row, None)
            if under_way is not None and not under_way.future.cancel():
                under_way.future.add_done_callback(partial(self._close_late, trajectory))
            self._held_turns = [turn for turn in self._held_turns if turn[0] is not trajectory]
            self._finish(trajectory, "cut")

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
        for trajectory, token_ids in held_turns:
            super()._start_turn(trajectory, token_ids)

    def _start_turn(self, trajectory: Trajectory, token_ids: Sequence[int] | None = None) -> None:
        if self._waiting_weights is None:
            super()._start_turn(trajectory, token_ids)
        else:
            self._held_turns.append((trajectory, token_ids))

    def snapshot(self) -> list[Trajectory]:
        """Return all trajectories as they stand, for a checkpoint.

        Those that run are copied, and the copies end as "kept". A trajectory whose environment has a state of
        its own begins anew.
        """
        observations = {trajectory.row: token_ids for trajectory, token_ids in self._held_turns}
        copies = []
        for trajectory in self.live.values():
            if trajectory.finish_reason:
                copies.append(trajectory)
                continue
            episode = trajectory.episode
            env_class = trajectory.env_class
            if episode is not None and not self.environments[env_class].stateless:
                copy = Trajectory(trajectory.row, trajectory.prompt_ids, trajectory.seed, env_class=env_class)
                copy.columns = trajectory.columns
            else:
                copy = replace(trajectory, turns=[replace(turn) for turn in trajectory.turns])
                for name in ("response_ids", "response_mask", "log_probs", "contexts"):
                    setattr(copy, name, list(getattr(trajectory, name)))
                if (observation := observations.get(trajectory.row)) is not None:
                    # An observation without room is not added, and is asked for again.
                    if copy.num_tokens + len(observation) < self.max_context:
                        copy.add_observation(observation)
                elif trajectory.session_id is not None and episode is not None:
                    copy.keep(self._settled(trajectory.session_id, episode), self.engine.version)
            copy.finish_reason = KEPT
            copies.append(copy)
        return copies
