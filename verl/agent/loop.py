"""The loop over sessions: the policy writes a turn, its environment takes it, the policy goes on.

    open -> engine.step -> Completion -> the environment takes the turn --done--> finished
                ^                           |            |
                |                           |            +-- under way (a search, a thread, a process) --+
                +-- resume with the tokens -+<-------------------------- its observation ----------------+

There is no turn barrier: a trajectory goes on as soon as its observation is there, while the others decode.
At most `max_in_flight` are under way; the next start, in the order of their rows, as others end. A group that
is late (`stragglers.py`) is cut: its unfinished members end as "cut", without a token to learn from, or as
"kept". What an environment can't take ends its own trajectory, which is masked, and no other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

from verl.agent.engine_load import EngineLoad
from verl.agent.stragglers import StragglerWatch
from verl.agent.trajectory import KEPT, AgentConfig, Codec, Trajectory, Turn
from verl.environments.base import ActionUnderWay, BaseTextEnvStepOutput, EpisodeFailed
from verl.environments.executors import CLOSE_SECONDS, Environments, Episode, StepResult
from verl.environments.registry import SEARCH
from verl.verifiers.base import CouldNotVerify
from verl.workers.rollout.base import Completion, Partial, RolloutEngine, SamplingParams

# How a last generation stopped -> the ends of an episode that it says more about.
LIMITS_OF = {"length": ("done", "max_turns"), "eos": ("max_turns",)}


@dataclass(frozen=True)
class LoopEvent:
    """What `on_event` is told while trajectories run.

    kind: "text" (the policy wrote `text`) | "action" (its environment is at work on what `details` say) |
    "observation" (`text` is said to the policy; `details` of its turn) | "end" (`text`: the reason).
    """

    kind: Literal["text", "action", "observation", "end"]
    row: int
    text: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class PendingStep:
    """A turn that its environment is at work on, or an environment that is being made. `due`: the engine step
    at which what comes of it joins, with a fixed delay.
    """

    session_id: int | None  # None: of a trajectory whose session is opened afterwards
    trajectory: Trajectory
    future: Future[BaseTextEnvStepOutput] | Future[Episode]
    due: int
    ended: str = ""  # why the turn's generation stopped, as in `Completion`


class TrajectoryLoop:
    """Which session runs which trajectory, which actions are under way, and what is still to start."""

    def __init__(
        self,
        codec: Codec,
        engine: RolloutEngine,
        environments: Environments,
        config: AgentConfig,
        params: SamplingParams,
        trajectories: list[Trajectory],
        on_event: Callable[[LoopEvent], None] | None = None,
        *,
        groups: Sequence[Hashable] | None = None,
        keep_partial: bool = False,
    ) -> None:
        """
        Args:
            environments: those that the trajectories' `env_class` name.
            params: of every turn, but for the seed (the trajectory's), the stop strings (its environment's)
                and max_tokens (as room allows).
            trajectories: row i is entry i; those with a finish_reason are left as they are.
            groups: of each row, to cut stragglers by; None: none is cut.
            keep_partial: stragglers end as "kept" instead of "cut", unless they were kept before.
        """
        self.codec, self.engine, self.environments, self.config = codec, engine, environments, config
        self.params, self.trajectories, self.on_event = params, trajectories, on_event
        self.keep_partial, self.num_in_flight, self.num_steps = keep_partial, 0, 0
        self.max_context = min(self.config.max_prompt_length, self.engine.max_model_len)
        self.load = EngineLoad(engine)
        self.pending = deque(trajectory for trajectory in trajectories if not trajectory.finish_reason)
        self.sessions: dict[int, Trajectory] = {}
        self.waiting: list[PendingStep] = []
        self.ended: list[tuple[Trajectory, Episode]] = []
        self.shown: dict[int, int] = {}  # characters of the running turn that `on_event` has seen, by session
        self.watch: StragglerWatch | None = None
        self.unstarted: deque[int] = deque()  # sessions, as opened, none of whose tokens was seen
        if groups is not None and config.straggler_factor is not None:
            self.watch = StragglerWatch(config.straggler_factor, groups)
            for trajectory in trajectories:
                if trajectory.finish_reason:
                    self.watch.skip(trajectory.row)

    def run(self) -> None:
        """Runs every trajectory to its end. All sessions and environments are closed afterwards, also after
        an error.
        """
        try:
            self._start_pending()
            while self.num_in_flight:
                if self.engine.has_runnable:
                    completions = self.engine.step()
                    self.num_steps += 1
                    self.load.sample(self.num_steps)
                    if self.on_event is not None:
                        for session_id in self.sessions:
                            text = self.codec.decode_turn(self.engine.partial(session_id).token_ids)
                            if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                                self._show(session_id, text)
                    self._handle(completions)
                elif self.waiting:
                    self._wait()
                else:
                    raise RuntimeError(f"the engine stopped with {len(self.sessions)} sessions unfinished")
                self._cut_stragglers()
                self._join()
                self._start_pending()
        finally:
            for session_id in list(self.sessions):
                self.engine.close(session_id)
            for step in self.waiting:
                if not step.future.cancel():
                    step.future.add_done_callback(partial(self._close_late, step.trajectory))
            in_haste = self.num_in_flight > 0
            if in_haste:
                self.environments.give_up()
            for trajectory in self.trajectories:
                self._close(trajectory)
            self.environments.wait_for_ends(CLOSE_SECONDS if in_haste else None)
            for trajectory, episode in self.ended:
                trajectory.seconds = (episode.seconds_init, episode.seconds_step)
                trajectory.env_metrics = episode.metrics

    def _start_pending(self) -> None:
        limit = self.config.max_in_flight or len(self.trajectories)
        asking: list[tuple[int | None, Trajectory, str]] = []
        while self.pending and self.num_in_flight < limit:
            trajectory = self.pending.popleft()
            self.num_in_flight += 1
            try:
                episode = self.environments[trajectory.env_class].open(
                    trajectory.extras,
                    trajectory.messages,
                    trajectory.max_turns,
                    len(trajectory.turns) - trajectory.is_asking,
                    trajectory.kept_env,
                )
            except Exception as error:  # it is a user's environment: anything may come
                self._fail(None, trajectory, error)
                continue
            if isinstance(episode, Future):
                self.waiting.append(PendingStep(None, trajectory, episode, self.num_steps))
            elif trajectory.is_asking:
                trajectory.episode = episode
                self._note_start(trajectory)
                asking.append((None, trajectory, "stop"))
            else:
                self._begin(trajectory, episode)
        if asking:
            self._take_turns(asking)

    def _begin(self, trajectory: Trajectory, episode: Episode) -> None:
        """Its environment is ready."""
        trajectory.episode = episode
        if episode.messages is not None:  # what its `init` shows instead of the row's prompt
            try:
                ids = self.codec.prompt_ids(episode.messages)
            except Exception as error:  # templates raise all kinds for what is no message
                self._fail(None, trajectory, error)
                return
            trajectory.prompt_ids = ids[-self.config.max_start_length :]
        self._open(trajectory)

    def _open(self, trajectory: Trajectory) -> None:
        room = self.max_context - trajectory.num_tokens
        if room < 1:
            self._finish(None, trajectory, "length")
            return
        session_id = self.engine.open(
            trajectory.prompt_ids + trajectory.response_ids, self._turn_params(trajectory, room)
        )
        self.sessions[session_id] = trajectory
        if self.watch is not None:
            self.unstarted.append(session_id)

    def _turn_params(self, trajectory: Trajectory, room: int) -> SamplingParams:
        max_tokens = min(self.config.max_response_length - trajectory.num_begun, room)
        assert trajectory.episode is not None
        stop = self.codec.stop(trajectory.episode.stop)
        return replace(self.params, max_tokens=max_tokens, stop=stop, seed=trajectory.seed)

    def _handle(self, completions: list[Completion]) -> None:
        """Deals with the turns that ended in one step."""
        ended: list[tuple[int | None, Trajectory, str]] = []
        for completion in sorted(completions, key=lambda c: self.sessions[c.session_id].row):
            session_id, trajectory = completion.session_id, self.sessions[completion.session_id]
            self._note_start(trajectory)
            start, end = trajectory.add_sampled(completion.token_ids, completion.log_probs)
            if trajectory.version_first is None:
                trajectory.version_first = completion.version_first
            trajectory.version_last = completion.version_last
            text = self.codec.decode_turn(trajectory.response_ids[start:end])
            self._show(session_id, text)
            self.shown.pop(session_id, None)
            trajectory.turns.append(Turn("step", text, start, end))
            ended.append((session_id, trajectory, completion.finish_reason))
        self._take_turns(ended)

    def _take_turns(self, ended: Sequence[tuple[int | None, Trajectory, str]]) -> None:
        """Gives the last turns of trajectories, in the order of their rows, to their environments: those of
        one environment together. What comes back at once is dealt with here, the rest when it is there.
        """
        by_class: dict[str, list[Trajectory]] = {}
        for _, trajectory, _ in ended:
            by_class.setdefault(trajectory.env_class, []).append(trajectory)
        results: dict[int, StepResult] = {}
        for env_class, members in by_class.items():
            texts = [trajectory.turns[-1].text for trajectory in members]
            outputs = self.environments[env_class].step_many([t.episode for t in members if t.episode], texts)
            results.update(zip((trajectory.row for trajectory in members), outputs, strict=True))
        due = self.num_steps + (self.config.search_delay_steps or 0)
        for session_id, trajectory, reason in ended:
            result = results[trajectory.row]
            if isinstance(result, Future):
                if isinstance(result, ActionUnderWay):
                    turn = trajectory.turns[-1]
                    turn.action, turn.details = result.action, result.metadata
                    self._emit("action", trajectory, details=turn.details)
                self.waiting.append(PendingStep(session_id, trajectory, result, due, reason))
            else:
                self._take(session_id, trajectory, result, reason)

    def _wait(self) -> None:
        """Nothing can be decoded: until the next observation, or until a group is late."""
        if self.config.search_delay_steps is not None:  # the clock moves to the next observation
            self.num_steps = max(self.num_steps, min(step.due for step in self.waiting))
            return
        late_at = None if self.watch is None else self.watch.next_due()
        timeout = None if late_at is None else max(0.0, late_at - self._now()) + 0.001
        futures: list[Future[Any]] = [step.future for step in self.waiting]
        wait(futures, timeout, return_when=FIRST_COMPLETED)

    def _join(self) -> None:
        """Resumes the trajectories whose observations are there, or due."""
        is_timed = self.config.search_delay_steps is not None
        ready = [
            step for step in self.waiting if (step.due <= self.num_steps if is_timed else step.future.done())
        ]
        for step in sorted(ready, key=lambda step: step.trajectory.row):
            self.waiting.remove(step)
            try:
                result = step.future.result()  # waits for it, where it is due
            except Exception as error:  # of a user's environment, or it was cancelled
                self._fail(step.session_id, step.trajectory, error)
                continue
            if isinstance(result, Episode):
                self._begin(step.trajectory, result)
            else:
                self._take(step.session_id, step.trajectory, result, step.ended)

    def _take(
        self,
        session_id: int | None,
        trajectory: Trajectory,
        output: BaseTextEnvStepOutput | Exception,
        ended: str,
    ) -> None:
        """Goes on, or ends, with what the environment gave for the last turn."""
        if isinstance(output, Exception):
            self._fail(session_id, trajectory, output)
            return
        turn, environment = trajectory.turns[-1], self.environments[trajectory.env_class]
        if trajectory.env_class != SEARCH and (mistake := mistake_of(output, turn.text)) is not None:
            self._fail(session_id, trajectory, EpisodeFailed(mistake))
            return
        turn.action, turn.reward = output.get("action", turn.action), output["reward"]
        details = output.get("metadata") or {}
        turn.details = details if "action" in output else {"metadata": details}
        if output["done"]:
            reason = output.get("finish_reason", "done")
            if reason in LIMITS_OF.get(ended, ()):
                reason = ended
            self._finish(session_id, trajectory, reason)
            return
        if not environment.counts_turns and len(trajectory.turns) >= trajectory.max_turns:
            self._finish(session_id, trajectory, "length" if ended == "length" else "max_turns")
            return
        text = "".join(str(message["content"]) for message in output["observations"])
        self._emit("observation", trajectory, text, turn.details)
        if self.codec.is_chat(trajectory.env_class):
            try:
                ids = self.codec.chat_ids(output["observations"], trajectory.response_ids[-1])
            except Exception as error:  # templates raise all kinds for roles that they don't know
                self._fail(session_id, trajectory, error)
                return
        else:
            ids = self.codec.observation_ids(text, environment.observation_end)
        self._go_on(session_id, trajectory, ids)

    def _fail(self, session_id: int | None, trajectory: Trajectory, error: Exception) -> None:
        """Ends a trajectory that its environment could not take: nothing is learnt from it."""
        is_named = isinstance(error, EpisodeFailed | CouldNotVerify)
        reason = "unverified"
        if not isinstance(error, CouldNotVerify):
            reason = error.reason if isinstance(error, EpisodeFailed) else "env_failed"
        trajectory.error = str(error) if is_named else f"{type(error).__name__}: {error}"
        if trajectory.turns:
            trajectory.turns[-1].error = trajectory.error
        trajectory.mask()
        self._finish(session_id, trajectory, reason)

    def _go_on(self, session_id: int | None, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not write and starts its next turn, if both fit."""
        room = self.max_context - trajectory.num_tokens - len(token_ids)
        if room < 1:
            self._finish(session_id, trajectory, "length")
            return
        trajectory.add_observation(token_ids)
        if session_id is None:
            self._open(trajectory)
        else:
            self.engine.resume(session_id, token_ids, self._turn_params(trajectory, room))

    def _finish(self, session_id: int | None, trajectory: Trajectory, reason: str) -> None:
        trajectory.finish_reason = reason
        self.num_in_flight -= 1
        if session_id is not None:
            del self.sessions[session_id]
            self.engine.close(session_id)
        self._close(trajectory)
        if self.watch is not None:
            self.watch.end(trajectory.row, self._now())
        self._emit("end", trajectory, reason)

    def _close(self, trajectory: Trajectory) -> None:
        """Ends its environment, if it has one."""
        episode, trajectory.episode = trajectory.episode, None
        if episode is not None:
            self.environments[trajectory.env_class].close(episode)
            self.ended.append((trajectory, episode))

    def _close_late(self, trajectory: Trajectory, opened: Future[Any]) -> None:
        """Closes an environment that was being made when the loop ended."""
        if not opened.cancelled() and opened.exception() is None and isinstance(opened.result(), Episode):
            self.environments[trajectory.env_class].close(opened.result())

    def _now(self) -> float:
        """The clock of the straggler policy."""
        return time.perf_counter() if self.config.search_delay_steps is None else float(self.num_steps)

    def _note_start(self, trajectory: Trajectory) -> None:
        if self.watch is not None:
            self.watch.start(trajectory.row, self._now())

    def _cut_stragglers(self) -> None:
        """Ends the unfinished members of groups that the batch should not wait for."""
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
            self.watch.cut(rows)
            for row in rows:
                self._cut(self.trajectories[row])

    def _cut(self, trajectory: Trajectory) -> None:
        session_id = next((key for key, value in self.sessions.items() if value is trajectory), None)
        under_way = [step for step in self.waiting if step.trajectory is trajectory]
        for step in under_way:
            step.future.cancel()
            self.waiting.remove(step)
        environment = self.environments[trajectory.env_class]
        assert trajectory.episode is not None  # it has started
        is_kept = self.keep_partial and trajectory.num_old_turns is None
        if is_kept and not environment.stateless:
            # After a step whose observation did not join yet it is ahead of its trajectory.
            trajectory.kept_env = None if under_way else environment.keep(trajectory.episode)
            is_kept = trajectory.kept_env is not None
        if not is_kept:
            trajectory.mask()
            self._finish(session_id, trajectory, "cut")
            return
        if session_id is not None:
            begun, stop = self.engine.partial(session_id), self.codec.stop(trajectory.episode.stop)
            length = len(begun.token_ids) if stop is None else stop.settled_length(begun.token_ids)
            trajectory.keep(
                Partial(begun.token_ids[:length], begun.log_probs[:length], begun.version_first),
                self.engine.version,
            )
        if trajectory.kept_env is not None:
            trajectory.episode = None  # it goes on, and is closed at its end
        self._finish(session_id, trajectory, KEPT)

    def _emit(
        self,
        kind: Literal["text", "action", "observation", "end"],
        trajectory: Trajectory,
        text: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if self.on_event is not None:
            self.on_event(LoopEvent(kind, trajectory.row, text, details or {}))

    def _show(self, session_id: int, text: str) -> None:
        """Tells `on_event` what a running turn has written since the last time; `text`: all of the turn."""
        new = text[self.shown.get(session_id, 0) :]
        if new and self.on_event is not None:
            self.shown[session_id] = len(text)
            self._emit("text", self.sessions[session_id], new)


def mistake_of(output: Any, action: str) -> str | None:
    """Why what a `step` returned can't be gone on with; None: it can."""
    if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= output.keys():
        return f"step returned {output!r:.200}; expected a dictionary with observations, reward and done"
    if output.get("postprocessed_action") not in (None, action):
        return (
            "step returned another postprocessed_action than the action; only what was sampled is trained: "
            "let a wrong form cost reward instead"
        )
    reward, said = output["reward"], output["observations"]
    is_said = isinstance(said, list | tuple) and all(
        isinstance(message, Mapping) and "content" in message for message in said
    )
    if not output["done"] and not is_said:
        return f"step returned observations={said!r:.200}; expected a list of messages with role and content"
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        return f"step returned reward={reward!r}; expected a finite number, or None"
    return None
