"""The loop over sessions: the policy writes a turn, its environment takes it, the policy goes on.

    open -> engine.step -> Completion -> the environment takes the turn --done--> finished
                ^                           |            |
                |                           |            +-- under way (a search, a thread, a process) --+
                +-- resume with the tokens -+<-------------------------- its observation ----------------+

There is no turn barrier: a trajectory goes on as soon as its observation arrives, while the others decode.
At most `max_in_flight` trajectories are under way. As they end, the next ones start, in the order of their
rows. If a group is late (`stragglers.py`), its unfinished members are cut. They end as "cut", without a token
to learn from, or as "kept". A failure of an environment ends its own trajectory, which is masked, and no
other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from verl.agent.engine_load import EngineLoad
from verl.agent.stragglers import StragglerWatch
from verl.agent.trajectory import KEPT, PendingStep, Trajectory, Turn
from verl.data.rl_dataset import cut_prompt
from verl.environments.environment import (
    ActionUnderWay,
    BaseTextEnvStepOutput,
    EpisodeFailed,
    Message,
    output_problem,
)
from verl.environments.executors import CLOSE_SECONDS, Episode, StepResult
from verl.environments.registry import SEARCH
from verl.sessions.engine_contract import Completion, Partial, SamplingParams
from verl.utils.errors import CouldNotVerify
from verl.utils.importing import describe

if TYPE_CHECKING:
    from verl.agent.agent import EnvironmentAgent

# How the last generation stopped -> the finish reasons of an episode that it replaces because it says more.
LIMITS_OF = {"length": ("done", "max_turns"), "eos": ("max_turns",)}


@dataclass(frozen=True)
class LoopEvent:
    """An event that `on_event` receives while trajectories run.

    Attributes:
        kind: "text" (the policy wrote `text`), "action" (the environment is at work on the action that
            `details` describe), "observation" (the policy is given `text`, and `details` are those of its
            turn) or "end" (`text` is the finish reason).
        row: The row of the trajectory.
        text: The text of the event.
        details: More about the event, as plain data.
    """

    kind: Literal["text", "action", "observation", "end"]
    row: int
    text: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class TrajectoryLoop:
    """The loop that runs trajectories on the sessions of one engine.

    It knows which session runs which trajectory, which actions are under way, and which trajectories have
    still to start. A trajectory moves through these states:

        state          event, and the method that handles it          next state
        pending        there is room: `_start_pending` opens its      waiting, or running (`_start_episode`)
                       environment
        running        the engine ends the turn: `_handle`            ready_to_step
        ready_to_step  `_step_environments` passes the turn to the    waiting, or running (`_handle_output`)
                       environment
        waiting        the environment or its observation arrives:    running (`_start_episode`,
                       `_handle_arrivals`                             `_handle_output`)
        any            it is done, has no room, fails or is cut:      ended
                       `_finish`
    """

    def __init__(
        self,
        agent: EnvironmentAgent,
        params: SamplingParams,
        trajectories: list[Trajectory],
        *,
        groups: Sequence[Hashable] | None = None,
        keep_partial: bool = False,
    ) -> None:
        """Create a loop over trajectories, none of which has started.

        Args:
            agent: The agent whose engine, environments, codec and settings the loop uses.
            params: The sampling of every turn. The seed is the trajectory's, the stop strings are its
                environment's, and max_tokens is what the room allows.
            trajectories: Entry i is row i. Those with a finish_reason are left as they are.
            groups: The group of each row, by which stragglers are found. None means that no straggler is cut.
            keep_partial: Whether stragglers end as "kept" instead of "cut", unless they were kept before.
        """
        self.codec = agent.codec
        self.engine = agent.engine
        self.environments = agent.environments
        self.config = agent.config
        self.params = params
        self.on_event = agent.on_event
        self.live = {trajectory.row: trajectory for trajectory in trajectories}
        self.keep_partial = keep_partial
        self.num_in_flight = 0
        self.num_steps = 0
        self.max_context = min(self.config.max_prompt_length, self.engine.max_model_len)
        self.engine_load = EngineLoad(self.engine)
        self.pending = deque(trajectory for trajectory in trajectories if not trajectory.finish_reason)
        self.sessions: dict[int, Trajectory] = {}
        self.waiting: dict[int, PendingStep] = {}  # by row
        self.ready_to_step: list[Trajectory] = []  # their environments have still to take their last turn
        self.ended: list[tuple[Trajectory, Episode]] = []
        self.watch: StragglerWatch | None = None
        self.unstarted: deque[int] = deque()  # sessions without a token so far, in the order of opening
        if groups is not None and self.config.straggler_factor is not None:
            self.watch = StragglerWatch(self.config.straggler_factor, groups)
            for trajectory in trajectories:
                if trajectory.finish_reason:
                    self.watch.leave_out(trajectory.row)

    def run(self) -> None:
        """Run every trajectory to its end.

        All sessions and environments are closed afterwards, also after an error.
        """
        try:
            self._start_pending()
            while self.num_in_flight:
                self.advance()
        finally:
            self.end()

    def advance(self, news: Future[Any] | None = None) -> None:
        """Run one engine step, or, if nothing can be decoded, wait for an observation or for `news`."""
        if self.engine.has_runnable:
            completions = self.engine.step()
            self.num_steps += 1
            self.engine_load.sample(self.num_steps)
            if self.on_event is not None:
                for session_id, trajectory in self.sessions.items():
                    text = self.codec.decode_turn(self.engine.partial(session_id).token_ids)
                    if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                        self._show(trajectory, text)
            self._handle(completions)
        elif self.waiting:
            self._wait(news)
        else:
            raise RuntimeError(f"the engine stopped with {len(self.sessions)} sessions unfinished")
        self._cut_stragglers()
        self._handle_arrivals()
        self._start_pending()

    def end(self) -> None:
        """Close all sessions and environments."""
        for session_id in list(self.sessions):
            self.engine.close(session_id)
        for step in self.waiting.values():
            if not step.future.cancel():
                step.future.add_done_callback(partial(self._close_late, step.trajectory))
        in_haste = self.num_in_flight > 0
        if in_haste:
            self.environments.fail_pending_calls()
        for trajectory in self.live.values():
            self._close(trajectory)
        self.environments.wait_for_ends(CLOSE_SECONDS if in_haste else None)
        self.note_ends()

    def note_ends(self) -> None:
        """Copy to the trajectories the times and metrics of their environments that were closed."""
        for trajectory, episode in self.ended:
            trajectory.seconds = (episode.seconds_init, episode.seconds_step)
            trajectory.env_metrics = episode.metrics
        self.ended.clear()

    def _start_pending(self) -> None:
        limit = self.config.max_in_flight or math.inf
        while self.pending and self.num_in_flight < limit:
            trajectory = self.pending.popleft()
            self.num_in_flight += 1
            row = (trajectory.extras, trajectory.messages, trajectory.max_turns)
            num_turns = len(trajectory.turns) - trajectory.is_at_environment
            try:
                runner = self.environments[trajectory.env_class]
                episode = runner.open(*row, num_turns, trajectory.kept_env)
            except Exception as error:  # a user's environment may raise anything
                self._fail(trajectory, error)
                continue
            if isinstance(episode, Future):
                self.waiting[trajectory.row] = PendingStep(trajectory, episode, self.num_steps)
            else:
                self._start_episode(trajectory, episode)
        self._step_environments()

    def _start_episode(self, trajectory: Trajectory, episode: Episode) -> None:
        """Start a trajectory whose environment is ready."""
        trajectory.episode = episode
        if trajectory.is_at_environment:  # it was kept in this state
            self._note_start(trajectory)
            self.ready_to_step.append(trajectory)
            return
        if episode.messages is not None:  # its `init` shows these instead of the row's prompt
            if (ids := self._prompt_ids(trajectory, episode.messages)) is None:
                return
            trajectory.prompt_ids = cut_prompt(self.codec.tokenizer, ids, self.config.max_start_length)
        self._start_turn(trajectory)

    def _handle(self, completions: list[Completion]) -> None:
        """Record the turns that ended in one step and pass them to their environments."""
        for completion in sorted(completions, key=lambda c: self.sessions[c.session_id].row):
            trajectory = self.sessions[completion.session_id]
            self._note_start(trajectory)
            version = trajectory.version_begun if trajectory.num_begun else completion.version_first
            start, end = trajectory.add_sampled(completion.token_ids, completion.log_probs)
            if trajectory.version_first is None:
                trajectory.version_first = completion.version_first
            trajectory.version_last = completion.version_last
            text = self.codec.decode_turn(trajectory.response_ids[start:end])
            self._show(trajectory, text)
            trajectory.num_chars_shown = 0
            trajectory.stopped_by = completion.finish_reason
            trajectory.turns.append(Turn("step", text, start, end, version_first=version))
            self.ready_to_step.append(trajectory)
        self._step_environments()

    def _step_environments(self) -> None:
        """Pass finished turns to their environments, one call per environment.

        Immediate results are handled here, in the order of the turns. The rest are handled when they arrive.
        """
        ready_to_step = self.ready_to_step
        self.ready_to_step = []
        by_class: dict[str, list[Trajectory]] = {}
        for trajectory in ready_to_step:
            by_class.setdefault(trajectory.env_class, []).append(trajectory)
        results: dict[int, StepResult] = {}
        for env_class, members in by_class.items():
            texts = [trajectory.turns[-1].text for trajectory in members]
            if self.environments[env_class].reads_usage:
                for trajectory in members:
                    num_written = trajectory.turns[-1].end - trajectory.turns[-1].start
                    num_read = len(trajectory.context) - num_written
                    is_cut = trajectory.stopped_by == "length"
                    trajectory.episode.env.usage = (num_read, num_written, is_cut)  # type: ignore[union-attr]
            outputs = self.environments[env_class].step_many([t.episode for t in members if t.episode], texts)
            results.update(zip((trajectory.row for trajectory in members), outputs, strict=True))
        due = self.num_steps + (self.config.search_delay_steps or 0)
        for trajectory in ready_to_step:
            result = results[trajectory.row]
            if isinstance(result, ActionUnderWay):
                turn = trajectory.turns[-1]
                turn.action = result.action
                turn.details = result.metadata
                self._emit("action", trajectory, details=turn.details)
                self.waiting[trajectory.row] = PendingStep(trajectory, result.future, due, result.output)
            elif isinstance(result, Future):
                self.waiting[trajectory.row] = PendingStep(trajectory, result, due)
            else:
                self._handle_output(trajectory, result)

    def _wait(self, news: Future[Any] | None) -> None:
        """Wait until the next observation arrives, a group is late, or `news` is done.

        It is called when nothing can be decoded.
        """
        if self.config.search_delay_steps is not None:  # the clock moves to the next observation
            self.num_steps = max(self.num_steps, min(step.due for step in self.waiting.values()))
            return
        late_at = None if self.watch is None else self.watch.next_due()
        timeout = None if late_at is None else max(0.0, late_at - self._now()) + 0.001
        futures = [step.future for step in self.waiting.values()] + ([] if news is None else [news])
        wait(futures, timeout, return_when=FIRST_COMPLETED)

    def _handle_arrivals(self) -> None:
        """Handle the environments that are ready and the observations that have arrived, or are due."""
        is_timed = self.config.search_delay_steps is not None
        ready = [
            row
            for row, step in self.waiting.items()
            if (step.due <= self.num_steps if is_timed else step.future.done())
        ]
        for row in sorted(ready):
            step = self.waiting.pop(row)
            trajectory = step.trajectory
            try:
                result = step.outcome(step.future)  # waits if the step is due but not done
            except Exception as error:  # a user's environment may raise anything, or it was cancelled
                self._fail(trajectory, error)
                continue
            if isinstance(result, Episode):
                self._start_episode(trajectory, result)
            else:
                self._handle_output(trajectory, result)

    def _handle_output(self, trajectory: Trajectory, output: BaseTextEnvStepOutput | Exception) -> None:
        """Go on with the environment's output for the last turn, or end the trajectory."""
        if isinstance(output, Exception):
            self._fail(trajectory, output)
            return
        turn = trajectory.turns[-1]
        environment = self.environments[trajectory.env_class]
        if trajectory.env_class != SEARCH and (mistake := output_problem(output, turn.text)) is not None:
            self._fail(trajectory, EpisodeFailed(mistake))
            return
        turn.action = output.get("action", turn.action)
        turn.reward = output["reward"]
        details = output.get("metadata") or {}
        turn.details = details if "action" in output else {"metadata": details}
        if output["done"]:
            reason = output.get("finish_reason", "done")
            if reason in LIMITS_OF.get(trajectory.stopped_by, ()):
                reason = trajectory.stopped_by
            self._finish(trajectory, reason)
            return
        if not environment.counts_turns and len(trajectory.turns) >= trajectory.max_turns:
            self._finish(trajectory, "length" if trajectory.stopped_by == "length" else "max_turns")
            return
        text = "".join(str(message["content"]) for message in output["observations"])
        self._emit("observation", trajectory, text, turn.details)
        if output.get("is_new_context"):
            self._begin_context(trajectory, output["observations"])
            return
        try:
            if self.codec.is_chat(trajectory.env_class):
                ids = self.codec.chat_ids(output["observations"], trajectory.response_ids[-1])
            else:
                ids = self.codec.observation_ids(text, environment.observation_end)
        # A template raises for roles that it doesn't know, and a tokenizer for a text that is not a string.
        except Exception as error:
            self._fail(trajectory, error)
            return
        self._start_turn(trajectory, ids)

    def _begin_context(self, trajectory: Trajectory, messages: Sequence[Message]) -> None:
        """Go on with another conversation, in another session."""
        if (ids := self._prompt_ids(trajectory, messages)) is None:
            return
        if trajectory.num_tokens + len(ids) >= self.max_context:
            self._finish(trajectory, "length")
            return
        if trajectory.session_id is not None:
            del self.sessions[trajectory.session_id]
            self.engine.close(trajectory.session_id)
            trajectory.session_id = None
        trajectory.begin_context(ids)
        self._start_turn(trajectory)

    def _prompt_ids(self, trajectory: Trajectory, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens of a conversation. If it has none, end the trajectory and return None."""
        try:
            if not (ids := self.codec.prompt_ids(list(messages))):
                raise EpisodeFailed(f"found {messages!r:.200}, which has no token; expected a text")
            return ids
        except Exception as error:  # templates raise all kinds of errors for objects that are no messages
            self._fail(trajectory, error)
        return None

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        """End a trajectory after an error of its environment, and exclude it from training."""
        reason = "env_failed"
        trajectory.error = describe(error)
        if isinstance(error, EpisodeFailed | CouldNotVerify):
            reason = error.reason if isinstance(error, EpisodeFailed) else "unverified"
            trajectory.error = str(error)
        if trajectory.turns:
            trajectory.turns[-1].error = trajectory.error
        trajectory.mask_all()
        self._finish(trajectory, reason)

    def _start_turn(self, trajectory: Trajectory, token_ids: Sequence[int] | None = None) -> None:
        """Start the next turn of a trajectory, or end it if there is no room.

        Args:
            trajectory: The trajectory that goes on.
            token_ids: The observation that comes before the turn. None means that the turn is the first of
                its session.
        """
        room = self.max_context - trajectory.num_tokens - len(token_ids or ())
        if room < 1:
            self._finish(trajectory, "length")
            return
        if token_ids is not None:
            trajectory.add_observation(token_ids)
        assert trajectory.episode is not None
        goes_on = trajectory.session_id is not None and token_ids is not None
        # Otherwise its seed is new, and nothing was drawn with it.
        if not goes_on and (trajectory.params is not None or trajectory.contexts):
            trajectory.drawn_before = sum(trajectory.response_mask)
        params = replace(
            trajectory.params or self.params,
            max_tokens=min(self.config.max_response_length - trajectory.num_begun, room),
            stop=self.codec.stop(trajectory.episode.stop),
            seed=trajectory.seed,
            drawn_before=trajectory.drawn_before,
        )
        if goes_on:
            assert trajectory.session_id is not None and token_ids is not None
            self.engine.resume(trajectory.session_id, token_ids, params)
            return
        trajectory.session_id = self.engine.open(trajectory.context, params)
        self.sessions[trajectory.session_id] = trajectory
        if self.watch is not None:
            self.unstarted.append(trajectory.session_id)

    def _finish(self, trajectory: Trajectory, reason: str) -> None:
        trajectory.finish_reason = reason
        trajectory.room = self.max_context - trajectory.num_tokens
        self.num_in_flight -= 1
        if trajectory.session_id is not None:
            del self.sessions[trajectory.session_id]
            self.engine.close(trajectory.session_id)
        self._close(trajectory)
        if self.watch is not None:
            self.watch.end(trajectory.row, self._now())
        self._emit("end", trajectory, reason)

    def _close(self, trajectory: Trajectory) -> None:
        """End the environment of a trajectory, if it has one."""
        episode = trajectory.episode
        trajectory.episode = None
        if episode is not None:
            self.environments[trajectory.env_class].close(episode)
            self.ended.append((trajectory, episode))

    def _close_late(self, trajectory: Trajectory, opened: Future[Any]) -> None:
        """Close an environment that was being made when the loop ended."""
        if not opened.cancelled() and opened.exception() is None and isinstance(opened.result(), Episode):
            self.environments[trajectory.env_class].close(opened.result())

    def _now(self) -> float:
        """Return the time by the clock of the straggler policy."""
        return time.perf_counter() if self.config.search_delay_steps is None else float(self.num_steps)

    def _note_start(self, trajectory: Trajectory) -> None:
        if self.watch is not None:
            self.watch.start(trajectory.row, self._now())

    def _cut_stragglers(self) -> None:
        """End the unfinished members of groups that the batch should not wait for."""
        if self.watch is None:
            return
        while self.unstarted:  # engines start sessions in the order in which they were opened
            trajectory = self.sessions.get(self.unstarted[0])
            if trajectory is not None and not self.watch.has_started(trajectory.row):
                if not self.engine.partial(self.unstarted[0]).token_ids:
                    break
                self._note_start(trajectory)
            self.unstarted.popleft()
        for rows in self.watch.late(self._now()):
            self.watch.exclude_from_times(rows)
            for row in rows:
                self._cut(self.live[row])

    def _cut(self, trajectory: Trajectory) -> None:
        environment = self.environments[trajectory.env_class]
        episode = trajectory.episode
        assert episode is not None  # the trajectory has started
        under_way = self.waiting.pop(trajectory.row, None)
        if under_way is not None:
            under_way.future.cancel()
        is_kept = self.keep_partial and trajectory.num_old_turns is None
        if is_kept and not environment.stateless:
            # With a step under way the environment is ahead of its trajectory and can't be kept.
            trajectory.kept_env = None if under_way else environment.pickle_env(episode)
            is_kept = trajectory.kept_env is not None
        if not is_kept:
            trajectory.mask_all()
            self._finish(trajectory, "cut")
            return
        if trajectory.session_id is not None:
            trajectory.keep(self._settled(trajectory.session_id, episode), self.engine.version)
        if trajectory.kept_env is not None:
            trajectory.episode = None  # the kept environment goes on in a later step and is closed at its end
        self._finish(trajectory, KEPT)

    def _settled(self, session_id: int, episode: Episode) -> Partial:
        """Return what a session's running turn has sampled, up to where a stop string may have begun."""
        begun = self.engine.partial(session_id)
        stop = self.codec.stop(episode.stop)
        length = len(begun.token_ids) if stop is None else stop.settled_length(begun.token_ids)
        return Partial(begun.token_ids[:length], begun.log_probs[:length], begun.version_first)

    def _emit(self, kind: Any, trajectory: Trajectory, text: str = "", details: Any = None) -> None:
        if self.on_event is not None:
            self.on_event(LoopEvent(kind, trajectory.row, text, details or {}))

    def _show(self, trajectory: Trajectory, text: str) -> None:
        """Tell `on_event` what a running turn has written since the last time.

        Args:
            trajectory: The trajectory of the turn.
            text: The text of the whole turn so far.
        """
        if self.on_event is not None and (new_text := text[trajectory.num_chars_shown :]):
            trajectory.num_chars_shown = len(text)
            self._emit("text", trajectory, new_text)
