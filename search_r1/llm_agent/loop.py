"""One batch of trajectories on its way between the rollout engine and the search engine.

    open -> engine.step -> Completion --answer--------------------------> finished
                ^                     --search--> client (background) --+
                |                     --no action--> hint --+           |
                +-------- resume with the tokens <----------+-----------+

There is no turn barrier: a trajectory goes on as soon as its documents are there, while the others decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Literal

from search_r1.llm_agent.actions import HINT, parse_action
from search_r1.llm_agent.codec import Codec
from search_r1.llm_agent.config import GenerationConfig
from search_r1.llm_agent.trajectory import Trajectory, Turn
from search_r1.search.client import FoundDocument, SearchClient, SearchError
from verl.workers.rollout.engine import Completion, RolloutEngine, SamplingParams

EventKind = Literal["text", "search", "observation", "hint", "end"]


@dataclass(frozen=True)
class Event:
    """What `on_event` is told while trajectories run.

    kind: "text" (the policy wrote `text`) | "search" (`text` is the query) | "observation" (`documents`
    came) | "hint" (`text` is said to the policy after a turn without an action) | "end" (`text`: the reason).
    """

    kind: EventKind
    row: int
    text: str = ""
    documents: list[FoundDocument] = field(default_factory=list)


@dataclass
class _Search:
    """A search under way. `due`: the engine step at which its observation joins, with a fixed delay."""

    session_id: int
    trajectory: Trajectory
    future: Future[list[FoundDocument]]
    due: int
    started: float  # time.perf_counter()
    finished: float | None = None

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._note_time)

    def _note_time(self, _: Future[list[FoundDocument]]) -> None:
        self.finished = time.perf_counter()


class TrajectoryLoop:
    """Which session runs which trajectory, and which searches are out."""

    def __init__(
        self,
        codec: Codec,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        params: SamplingParams,
        trajectories: list[Trajectory],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`params`: of every turn, but for the seed (the trajectory's) and max_tokens (as room allows)."""
        self.codec, self.engine, self.search_client, self.config = codec, engine, search_client, config
        self.params, self.trajectories, self.on_event = params, trajectories, on_event
        self.max_tokens = min(self.config.max_prompt_length, self.engine.max_model_len)
        self.max_turns = self.config.max_turns if self.config.do_search else 0
        self.sessions: dict[int, Trajectory] = {}
        self.searches: list[_Search] = []
        self.num_steps = 0
        self.shown: dict[int, int] = {}  # characters of the running turn that `on_event` has seen, by session

    def run(self) -> None:
        """Runs every trajectory to its end. All sessions are closed afterwards, also after an error."""
        try:
            for trajectory in self.trajectories:
                self._open(trajectory)
            while self.sessions:
                if self.engine.has_runnable:
                    completions = self.engine.step()
                    self.num_steps += 1
                    self._show_partial()
                    self._handle(completions)
                elif not self.searches:
                    raise RuntimeError(f"the engine stopped with {len(self.sessions)} sessions unfinished")
                self._join_searches()
        finally:
            for session_id in list(self.sessions):
                self.engine.close(session_id)

    def _open(self, trajectory: Trajectory) -> None:
        room = self.max_tokens - trajectory.num_tokens
        if room < 1:
            trajectory.finish_reason = "length"
            return
        session_id = self.engine.open(trajectory.prompt_ids, self._turn_params(trajectory, room))
        self.sessions[session_id] = trajectory

    def _turn_params(self, trajectory: Trajectory, room: int) -> SamplingParams:
        max_tokens = min(self.config.max_response_length, room)
        return replace(self.params, max_tokens=max_tokens, seed=trajectory.seed)

    def _handle(self, completions: list[Completion]) -> None:
        """Deals with the turns that ended in one step; their searches go out together."""
        asked: list[tuple[int, str]] = []
        for completion in sorted(completions, key=lambda c: self.sessions[c.session_id].row):
            session_id, trajectory = completion.session_id, self.sessions[completion.session_id]
            turn = self._add_turn(trajectory, completion)
            self._show_rest(session_id, turn)
            is_last = len(trajectory.turns) > self.max_turns
            if turn.action == "answer":
                self._finish(session_id, "answer")
            elif is_last:
                ended = {"length": "length", "eos": "eos"}.get(completion.finish_reason, "max_turns")
                self._finish(session_id, ended)
            elif turn.query is not None:
                asked.append((session_id, turn.query))
                self._emit("search", trajectory, turn.query)
            else:
                self._emit("hint", trajectory, HINT)
                self._go_on(session_id, self.codec.hint_ids)
        if asked:
            self._search(asked)

    def _add_turn(self, trajectory: Trajectory, completion: Completion) -> Turn:
        start, end = trajectory.add_sampled(completion.token_ids, completion.log_probs)
        if trajectory.version_first is None:
            trajectory.version_first = completion.version_first
        trajectory.version_last = completion.version_last
        text = self.codec.decode_turn(completion.token_ids)
        action = parse_action(text, self.config.do_search)
        is_last = len(trajectory.turns) == self.max_turns
        kind = "none" if action.kind == "invalid" and is_last else action.kind
        query = action.content if kind == "search" else None
        turn = Turn(kind, text, query, start, end)
        trajectory.turns.append(turn)
        return turn

    def _search(self, asked: list[tuple[int, str]]) -> None:
        assert self.search_client is not None
        due = self.num_steps + (self.config.search_delay_steps or 0)
        started = time.perf_counter()
        futures = self.search_client.submit([query for _, query in asked], self.config.topk)
        for (session_id, _), future in zip(asked, futures, strict=True):
            self.searches.append(_Search(session_id, self.sessions[session_id], future, due, started))

    def _join_searches(self) -> None:
        """Resumes the trajectories whose documents are there, or due; waits only if nothing else can run."""
        if not self.searches:
            return
        idle = not self.engine.has_runnable
        if self.config.search_delay_steps is None:
            if idle:
                wait([search.future for search in self.searches], return_when=FIRST_COMPLETED)
            ready = [search for search in self.searches if search.future.done()]
        else:
            if idle:  # no step will come by itself: the clock moves to the next observation
                self.num_steps = max(self.num_steps, min(search.due for search in self.searches))
            ready = [search for search in self.searches if search.due <= self.num_steps]
        for search in sorted(ready, key=lambda search: search.trajectory.row):
            self.searches.remove(search)
            self._receive(search)

    def _receive(self, search: _Search) -> None:
        turn = search.trajectory.turns[-1]
        try:
            turn.documents = search.future.result()
        except SearchError as error:
            search.trajectory.fail(str(error))
            self._finish(search.session_id, "search_failed")
            return
        turn.search_seconds = (search.finished or time.perf_counter()) - search.started
        self._emit("observation", search.trajectory, documents=turn.documents)
        self._go_on(search.session_id, self.codec.observation_ids(turn.documents))

    def _go_on(self, session_id: int, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not write and starts its next turn, if both fit."""
        trajectory = self.sessions[session_id]
        room = self.max_tokens - trajectory.num_tokens - len(token_ids)
        if room < 1:
            self._finish(session_id, "length")
            return
        trajectory.add_observation(token_ids)
        self.engine.resume(session_id, token_ids, self._turn_params(trajectory, room))

    def _finish(self, session_id: int, reason: str) -> None:
        trajectory = self.sessions.pop(session_id)
        trajectory.finish_reason = reason
        self.engine.close(session_id)
        self._emit("end", trajectory, reason)

    def _emit(
        self,
        kind: EventKind,
        trajectory: Trajectory,
        text: str = "",
        documents: Sequence[FoundDocument] = (),
    ) -> None:
        if self.on_event is not None:
            self.on_event(Event(kind, trajectory.row, text, list(documents)))

    def _show_partial(self) -> None:
        """Tells `on_event` what running turns have written since the last step."""
        if self.on_event is None:
            return
        for session_id in self.sessions:
            text = self.codec.decode_turn(self.engine.partial(session_id))
            if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                self._show(session_id, text)

    def _show_rest(self, session_id: int, turn: Turn) -> None:
        if self.on_event is not None:
            self._show(session_id, turn.text)
            self.shown.pop(session_id, None)

    def _show(self, session_id: int, text: str) -> None:
        new = text[self.shown.get(session_id, 0) :]
        if new:
            self.shown[session_id] = len(text)
            self._emit("text", self.sessions[session_id], new)
