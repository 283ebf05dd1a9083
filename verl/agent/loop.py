"""The loop over sessions: the policy writes a turn, its environment takes it, the policy goes on.

Each row is an `Episode`, whose states and events are drawn in `episode.py`. This is how the loop moves it:

    state      the loop waits for                 then calls                          and the state becomes
    PENDING    room among `max_in_flight`         `_start_pending`: runner.open       OPENING
    OPENING    the environment that is made       `_start_episode`                    DECODING (`_start_turn`)
    DECODING   the engine's Completion            `_end_turns`                        STEP_DUE
    STEP_DUE   nothing                            `_step_environments`: step_many     STEPPING
    STEPPING   the environment's output           `_handle_output`                    DECODING (`_start_turn`)
    any        -                                  `_finish`                           ENDED

An environment or an output that is there at once is handled at once. Otherwise it is in `waiting` until
`_handle_arrivals` sees it. An episode of a checkpoint, with a turn at its environment, goes from OPENING to
STEP_DUE. `TrajectoryService` can hold a turn back before it starts (HELD).

There is no turn barrier: an episode goes on as soon as its observation arrives, while the others decode.
At most `max_in_flight` episodes are under way. As they end, the next ones start, in the order of their
rows. If a group is late (`stragglers.py`), its unfinished members are cut. They end as "cut", without a token
to learn from. A failure of an environment ends its own episode, whose trajectory is masked, and
no other.
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
from verl.agent.episode import Episode, EpisodeEvent, PendingWork
from verl.agent.stragglers import StragglerWatch
from verl.agent.trajectory import Trajectory, Turn
from verl.data.rl_dataset import cut_prompt
from verl.environments.environment import (
    ActionUnderWay,
    BaseTextEnvStepOutput,
    EpisodeFailed,
    Message,
    content_problem,
    location_of,
    output_problem,
    with_text,
)
from verl.environments.executors import CLOSE_SECONDS, EnvironmentHandle, StepResult
from verl.environments.registry import SEARCH, load_class
from verl.sessions.engine_contract import Completion, SamplingParams
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
    """The loop that runs episodes on the sessions of one engine.

    Attributes:
        live: The episodes, by row.
        pending: Those in PENDING, in the order in which they start.
        sessions: Those that have a session of the engine, by its id.
        ready_to_step: Those in STEP_DUE.
        waiting: The work that those in OPENING and STEPPING wait for, by row.
        num_in_flight: The number of episodes that are neither in PENDING nor in ENDED.
        ended: Handles of environments that are closed or being closed, with their trajectories.
        unstarted: Sessions without a token so far, in the order of opening. Only with `watch`.
    """

    def __init__(
        self,
        agent: EnvironmentAgent,
        params: SamplingParams,
        episodes: Sequence[Episode],
        *,
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        """Create a loop over episodes, none of which has started.

        Args:
            agent: The agent whose engine, environments, codec and settings the loop uses.
            params: The sampling of every turn. The seed is the trajectory's, the stop strings are its
                environment's, and max_tokens is what the room allows.
            episodes: The episodes. Those whose trajectory has a finish_reason are left as they are.
            groups: The group of each row, by which stragglers are found. Entry i is that of row i. None means
                that no straggler is cut.
        """
        self.codec = agent.codec
        self.engine = agent.engine
        self.environments = agent.environments
        self.config = agent.config
        self.params = params
        self.on_event = agent.on_event
        self.live = {episode.trajectory.row: episode for episode in episodes}
        self.num_in_flight = 0
        self.num_steps = 0
        self.max_context = min(self.config.max_prompt_length, self.engine.max_model_len)
        self.engine_load = EngineLoad(self.engine)
        self.pending = deque(episode for episode in episodes if not episode.trajectory.finish_reason)
        self.sessions: dict[int, Episode] = {}
        self.waiting: dict[int, PendingWork] = {}
        self.ready_to_step: list[Episode] = []
        self.ended: list[tuple[Trajectory, EnvironmentHandle]] = []
        self.watch: StragglerWatch | None = None
        self.unstarted: deque[int] = deque()
        if groups is not None and self.config.straggler_factor is not None:
            self.watch = StragglerWatch(self.config.straggler_factor, groups)
            for episode in episodes:
                if episode.trajectory.finish_reason:
                    self.watch.leave_out(episode.trajectory.row)

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
                for session_id, episode in self.sessions.items():
                    text = self.codec.decode_turn(self.engine.partial(session_id).token_ids)
                    if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                        self._show(episode, text)
            self._end_turns(completions)
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
        for work in self.waiting.values():
            if not work.future.cancel():
                work.future.add_done_callback(partial(self._close_late, work.episode))
        in_haste = self.num_in_flight > 0
        if in_haste:
            self.environments.fail_pending_calls()
        for episode in self.live.values():
            self._close(episode)
        self.environments.wait_until_closed(CLOSE_SECONDS if in_haste else None)
        self.note_ends()

    def note_ends(self) -> None:
        """Copy to the trajectories the times and metrics of their environments that were closed."""
        for trajectory, handle in self.ended:
            trajectory.seconds = (handle.seconds_init, handle.seconds_step)
            trajectory.env_metrics = handle.metrics
        self.ended.clear()

    def _start_pending(self) -> None:
        """Open the environments of the next episodes, as many as there is room for."""
        limit = self.config.max_in_flight or math.inf
        while self.pending and self.num_in_flight < limit:
            episode = self.pending.popleft()
            trajectory = episode.trajectory
            episode.handle_event(EpisodeEvent.ADMITTED)
            self.num_in_flight += 1
            num_turns = len(trajectory.turns) - trajectory.is_at_environment
            try:
                runner = self.environments[trajectory.env_class]
                handle = runner.open(episode.extras, episode.messages, episode.max_turns, num_turns)
            except Exception as error:  # a user's environment may raise anything
                self._fail(episode, error)
                continue
            if isinstance(handle, Future):
                self.waiting[trajectory.row] = PendingWork(episode, handle, self.num_steps)
            else:
                self._start_episode(episode, handle)
        self._step_environments()

    def _start_episode(self, episode: Episode, handle: EnvironmentHandle) -> None:
        """Start an episode whose environment is ready."""
        trajectory = episode.trajectory
        episode.handle = handle
        if trajectory.is_at_environment:
            episode.handle_event(EpisodeEvent.TURN_RESTORED)
            self._note_start(trajectory)
            self.ready_to_step.append(episode)
            return
        if handle.messages is not None:  # its `init` shows these instead of the row's prompt
            ids = self._prompt_ids(episode, handle.messages)
            if ids is None:
                return
            trajectory.prompt_ids = cut_prompt(self.codec.tokenizer, ids, self.config.max_start_length)
        self._start_turn(episode)

    def _end_turns(self, completions: list[Completion]) -> None:
        """Record the turns that the engine ended in one step, and pass them to their environments."""
        for completion in sorted(completions, key=lambda c: self.sessions[c.session_id].trajectory.row):
            episode = self.sessions[completion.session_id]
            trajectory = episode.trajectory
            self._note_start(trajectory)
            version = trajectory.version_begun if trajectory.num_begun else completion.version_first
            start, end = trajectory.add_sampled(completion.token_ids, completion.log_probs)
            if trajectory.version_first is None:
                trajectory.version_first = completion.version_first
            trajectory.version_last = completion.version_last
            text = self.codec.decode_turn(trajectory.response_ids[start:end])
            self._show(episode, text)
            episode.num_chars_shown = 0
            trajectory.stopped_by = completion.finish_reason
            trajectory.turns.append(Turn("step", text, start, end, version_first=version))
            episode.handle_event(EpisodeEvent.TURN_ENDED)
            self.ready_to_step.append(episode)
        self._step_environments()

    def _step_environments(self) -> None:
        """Pass finished turns to their environments, one call per environment.

        Immediate results are handled here, in the order of the turns. The rest are handled when they arrive.
        """
        ready_to_step = self.ready_to_step
        self.ready_to_step = []
        by_class: dict[str, list[Episode]] = {}
        for episode in ready_to_step:
            episode.handle_event(EpisodeEvent.STEP_STARTED)
            by_class.setdefault(episode.trajectory.env_class, []).append(episode)
        results: dict[int, StepResult] = {}
        for env_class, members in by_class.items():
            runner = self.environments[env_class]
            texts = [episode.trajectory.turns[-1].text for episode in members]
            handles = [episode.handle for episode in members if episode.handle is not None]
            if runner.reads_usage:
                for episode, handle in zip(members, handles, strict=True):
                    trajectory = episode.trajectory
                    num_written = trajectory.turns[-1].end - trajectory.turns[-1].start
                    num_read = len(trajectory.context) - num_written
                    is_cut = trajectory.stopped_by == "length"
                    handle.env.usage = (num_read, num_written, is_cut)
            outputs = runner.step_many(handles, texts)
            for episode, output in zip(members, outputs, strict=True):
                results[episode.trajectory.row] = output
        due = self.num_steps + (self.config.search_delay_steps or 0)
        for episode in ready_to_step:
            trajectory = episode.trajectory
            result = results[trajectory.row]
            if isinstance(result, ActionUnderWay):
                turn = trajectory.turns[-1]
                turn.action = result.action
                turn.details = result.metadata
                self._emit("action", trajectory, details=turn.details)
                self.waiting[trajectory.row] = PendingWork(episode, result.future, due, result.output)
            elif isinstance(result, Future):
                self.waiting[trajectory.row] = PendingWork(episode, result, due)
            else:
                self._handle_output(episode, result)

    def _wait(self, news: Future[Any] | None) -> None:
        """Wait until the next observation arrives, a group is late, or `news` is done.

        It is called when nothing can be decoded.
        """
        if self.config.search_delay_steps is not None:  # the clock moves to the next observation
            self.num_steps = max(self.num_steps, min(work.due for work in self.waiting.values()))
            return
        late_at = None if self.watch is None else self.watch.next_due()
        timeout = None if late_at is None else max(0.0, late_at - self._now()) + 0.001
        futures = [work.future for work in self.waiting.values()]
        if news is not None:
            futures.append(news)
        wait(futures, timeout, return_when=FIRST_COMPLETED)

    def _handle_arrivals(self) -> None:
        """Handle the environments that are ready and the observations that have arrived, or are due."""
        is_timed = self.config.search_delay_steps is not None
        ready = [
            row
            for row, work in self.waiting.items()
            if (work.due <= self.num_steps if is_timed else work.future.done())
        ]
        for row in sorted(ready):
            work = self.waiting.pop(row)
            try:
                result = work.outcome(work.future)  # waits if the outcome is due but not there
            except Exception as error:  # a user's environment may raise anything, or it was cancelled
                self._fail(work.episode, error)
                continue
            if isinstance(result, EnvironmentHandle):
                self._start_episode(work.episode, result)
            else:
                self._handle_output(work.episode, result)

    def _handle_output(self, episode: Episode, output: BaseTextEnvStepOutput | Exception) -> None:
        """Go on with the environment's output for the last turn, or end the episode."""
        if isinstance(output, Exception):
            self._fail(episode, output)
            return
        trajectory = episode.trajectory
        turn = trajectory.turns[-1]
        runner = self.environments[trajectory.env_class]
        if trajectory.env_class != SEARCH and (mistake := output_problem(output, turn.text)) is not None:
            location = location_of(load_class(trajectory.env_class)[0], "step")
            self._fail(episode, EpisodeFailed(f"{trajectory.env_class}: {mistake}{location}"))
            return
        turn.action = output.get("action", turn.action)
        turn.reward = output["reward"]
        details = output.get("metadata") or {}
        turn.details = details if "action" in output else {"metadata": details}
        if output["done"]:
            reason = output.get("finish_reason", "done")
            if reason in LIMITS_OF.get(trajectory.stopped_by, ()):
                reason = trajectory.stopped_by
            self._finish(episode, reason)
            return
        if not runner.counts_turns and len(trajectory.turns) >= episode.max_turns:
            self._finish(episode, "length" if trajectory.stopped_by == "length" else "max_turns")
            return
        observations = [with_text(message) for message in output["observations"]]
        text = "".join(message["content"] for message in observations)
        self._emit("observation", trajectory, text, turn.details)
        if output.get("is_new_context"):
            self._begin_context(episode, observations)
            return
        try:
            if self.codec.is_chat(trajectory.env_class):
                ids = self.codec.chat_ids(observations, trajectory.response_ids[-1])
            else:
                ids = self.codec.observation_ids(text, runner.observation_end)
        # A template raises for roles that it doesn't know, and a tokenizer for a text that is not a string.
        except Exception as error:
            self._fail(episode, error)
            return
        self._start_turn(episode, ids)

    def _begin_context(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Go on with another conversation, in another session."""
        ids = self._prompt_ids(episode, messages)
        if ids is None:
            return
        if episode.trajectory.num_tokens + len(ids) >= self.max_context:
            self._finish(episode, "length")
            return
        self._close_session(episode)
        episode.trajectory.begin_context(ids)
        self._start_turn(episode)

    def _prompt_ids(self, episode: Episode, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens of a conversation. If it has none, end the episode and return None."""
        try:
            for message in messages:
                if message.get("content") is None and message.get("tool_calls"):
                    continue
                if (problem := content_problem(message)) is not None:
                    raise EpisodeFailed(f"{episode.trajectory.env_class}: found {problem}")
            messages = [with_text(message) if "content" in message else message for message in messages]
            if not (ids := self.codec.prompt_ids(list(messages))):
                raise EpisodeFailed(f"found {messages!r:.200}, which has no token; expected a text")
            return ids
        except Exception as error:  # templates raise all kinds of errors for objects that are no messages
            self._fail(episode, error)
        return None

    def _fail(self, episode: Episode, error: Exception) -> None:
        """End an episode after an error of its environment, and exclude it from training."""
        trajectory = episode.trajectory
        reason = "env_failed"
        trajectory.error = describe(error)
        if isinstance(error, EpisodeFailed | CouldNotVerify):
            reason = error.reason if isinstance(error, EpisodeFailed) else "unverified"
            trajectory.error = str(error)
        if trajectory.turns:
            trajectory.turns[-1].error = trajectory.error
        trajectory.mask_all()
        self._finish(episode, reason)

    def _start_turn(self, episode: Episode, token_ids: Sequence[int] | None = None) -> None:
        """Start the next turn of an episode, or end it if there is no room.

        Args:
            episode: The episode that goes on.
            token_ids: The observation that comes before the turn. None means that the turn is the first of
                its session.
        """
        trajectory = episode.trajectory
        room = self.max_context - trajectory.num_tokens - len(token_ids or ())
        if room < 1:
            self._finish(episode, "length")
            return
        if token_ids is not None:
            trajectory.add_observation(token_ids)
        episode.handle_event(EpisodeEvent.TURN_STARTED)
        assert episode.handle is not None
        goes_on = episode.session_id is not None and token_ids is not None
        # Otherwise its seed is new, and nothing was drawn with it.
        if not goes_on and (episode.params is not None or trajectory.contexts):
            episode.drawn_before = sum(trajectory.response_mask)
        params = replace(
            episode.params or self.params,
            max_tokens=min(self.config.max_response_length - trajectory.num_begun, room),
            stop=self.codec.stop(episode.handle.stop),
            seed=trajectory.seed,
            drawn_before=episode.drawn_before,
        )
        if goes_on:
            assert episode.session_id is not None and token_ids is not None
            self.engine.resume(episode.session_id, token_ids, params)
            return
        episode.session_id = self.engine.open(trajectory.context, params)
        self.sessions[episode.session_id] = episode
        if self.watch is not None:
            self.unstarted.append(episode.session_id)

    def _finish(self, episode: Episode, reason: str) -> None:
        """End an episode: its session, its environment and its trajectory."""
        trajectory = episode.trajectory
        episode.handle_event(EpisodeEvent.FINISHED)
        trajectory.finish_reason = reason
        trajectory.room = self.max_context - trajectory.num_tokens
        self.num_in_flight -= 1
        self._close_session(episode)
        self._close(episode)
        if self.watch is not None:
            self.watch.end(trajectory.row, self._now())
        self._emit("end", trajectory, reason)

    def _close_session(self, episode: Episode) -> None:
        """Close the session of an episode in the engine, if it has one."""
        if episode.session_id is not None:
            del self.sessions[episode.session_id]
            self.engine.close(episode.session_id)
            episode.session_id = None

    def _close(self, episode: Episode) -> None:
        """Close the environment of an episode, if it has one."""
        handle = episode.handle
        episode.handle = None
        if handle is not None:
            self.environments[episode.trajectory.env_class].close(handle)
            self.ended.append((episode.trajectory, handle))

    def _close_late(self, episode: Episode, work: Future[Any]) -> None:
        """Close an environment that was being made when its episode ended."""
        if work.cancelled() or work.exception() is not None:
            return
        handle = work.result()
        if isinstance(handle, EnvironmentHandle):
            self.environments[episode.trajectory.env_class].close(handle)

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
            episode = self.sessions.get(self.unstarted[0])
            if episode is not None and not self.watch.has_started(episode.trajectory.row):
                if not self.engine.partial(self.unstarted[0]).token_ids:
                    break
                self._note_start(episode.trajectory)
            self.unstarted.popleft()
        for rows in self.watch.late(self._now()):
            self.watch.exclude_from_times(rows)
            for row in rows:
                self._cut(self.live[row])

    def _cut(self, episode: Episode) -> None:
        """End an episode before its time, without a token to learn from."""
        trajectory = episode.trajectory
        under_way = self.waiting.pop(trajectory.row, None)
        if under_way is not None:
            under_way.future.cancel()
        trajectory.mask_all()
        self._finish(episode, "cut")

    def _emit(self, kind: Any, trajectory: Trajectory, text: str = "", details: Any = None) -> None:
        if self.on_event is not None:
            self.on_event(LoopEvent(kind, trajectory.row, text, details or {}))

    def _show(self, episode: Episode, text: str) -> None:
        """Tell `on_event` what a running turn has written since the last time.

        Args:
            episode: The episode of the turn.
            text: The text of the whole turn so far.
        """
        if self.on_event is None:
            return
        new_text = text[episode.num_chars_shown :]
        if new_text:
            episode.num_chars_shown = len(text)
            self._emit("text", episode.trajectory, new_text)
