"""LLMGenerationManager: from prompts to trajectories with searches in them, as a batch for training.

    open -> engine.step -> Completion --answer--------------------------> finished -> DataProto
                ^                     --search--> client (background) --+
                |                     --no action--> hint --+           |
                +-------- resume with the tokens <----------+-----------+

There is no turn barrier: a trajectory goes on as soon as its documents are there, while the others decode.
At most `max_in_flight` are under way; the next start, in the order of their rows, as others end. A group that
is late (`stragglers.py`) is cut: its unfinished members end as "cut", without a token to learn from, or as
"kept".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Literal

from search_r1.llm_agent.engine_load import EngineLoad
from search_r1.llm_agent.stragglers import StragglerWatch
from search_r1.llm_agent.trajectory import (
    HINT,
    KEPT,
    Codec,
    Event,
    GenerationConfig,
    Trajectory,
    Turn,
    generation_eos_ids,
    parse_action,
    search_metrics,
    to_tensors,
)
from search_r1.search.client import FoundDocument, SearchClient, SearchError
from verl.config import Config
from verl.protocol import DataProto
from verl.workers.rollout.base import Completion, Partial, RolloutEngine, SamplingParams


@dataclass
class _OpenSearch:
    """A search under way. `due`: the engine step at which its observation joins, with a fixed delay."""

    session_id: int | None  # None: of a continued trajectory, whose session is opened with the documents
    trajectory: Trajectory
    future: Future[list[FoundDocument]]
    due: int
    started: float  # time.perf_counter()
    finished: float | None = None

    def __post_init__(self) -> None:
        self.future.add_done_callback(lambda _: setattr(self, "finished", time.perf_counter()))


class TrajectoryLoop:
    """Which session runs which trajectory, which searches are out, and what is still to start."""

    def __init__(
        self,
        codec: Codec,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        params: SamplingParams,
        trajectories: list[Trajectory],
        on_event: Callable[[Event], None] | None = None,
        *,
        groups: Sequence[Hashable] | None = None,
        keep_partial: bool = False,
    ) -> None:
        """
        Args:
            params: of every turn, but for the seed (the trajectory's) and max_tokens (as room allows).
            trajectories: row i is entry i; those with a finish_reason are left as they are.
            groups: of each row, to cut stragglers by; None: none is cut.
            keep_partial: stragglers end as "kept" instead of "cut", unless they were kept before.
        """
        self.codec, self.engine, self.search_client, self.config = codec, engine, search_client, config
        self.params, self.trajectories, self.on_event = params, trajectories, on_event
        self.keep_partial = keep_partial
        self.max_context = min(self.config.max_prompt_length, self.engine.max_model_len)
        self.max_turns = self.config.max_turns if self.config.do_search else 0
        self.load = EngineLoad(engine)
        self.pending = deque(trajectory for trajectory in trajectories if not trajectory.finish_reason)
        self.num_in_flight = 0
        self.sessions: dict[int, Trajectory] = {}
        self.searches: list[_OpenSearch] = []
        self.num_steps = 0
        self.shown: dict[int, int] = {}  # characters of the running turn that `on_event` has seen, by session
        self.watch: StragglerWatch | None = None
        self.unstarted: deque[int] = deque()  # sessions, as opened, none of whose tokens was seen
        if groups is not None and config.straggler_factor is not None:
            self.watch = StragglerWatch(config.straggler_factor, groups)
            for trajectory in trajectories:
                if trajectory.finish_reason:
                    self.watch.skip(trajectory.row)

    def run(self) -> None:
        """Runs every trajectory to its end. All sessions are closed afterwards, also after an error."""
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
                elif self.searches:
                    self._wait_for_searches()
                else:
                    raise RuntimeError(f"the engine stopped with {len(self.sessions)} sessions unfinished")
                self._cut_stragglers()
                self._join_searches()
                self._start_pending()
        finally:
            for session_id in list(self.sessions):
                self.engine.close(session_id)

    def _start_pending(self) -> None:
        limit = self.config.max_in_flight or len(self.trajectories)
        new_searches: list[tuple[int | None, Trajectory, str]] = []
        while self.pending and self.num_in_flight < limit:
            trajectory = self.pending.popleft()
            self.num_in_flight += 1
            query = trajectory.query_to_ask
            if query is None:
                self._open(trajectory)
            else:
                self._note_start(trajectory)
                self._emit("search", trajectory, query)
                new_searches.append((None, trajectory, query))
        if new_searches:
            self._search(new_searches)

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
        return replace(self.params, max_tokens=max_tokens, seed=trajectory.seed)

    def _handle(self, completions: list[Completion]) -> None:
        """Deals with the turns that ended in one step; their searches go out together."""
        new_searches: list[tuple[int | None, Trajectory, str]] = []
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
            action = parse_action(text, self.config.do_search)
            is_last = len(trajectory.turns) == self.max_turns
            kind = "none" if action.kind == "invalid" and is_last else action.kind
            turn = Turn(kind, text, action.content if kind == "search" else None, start, end)
            trajectory.turns.append(turn)
            if turn.action == "answer":
                self._finish(session_id, trajectory, "answer")
            elif is_last:
                ended = {"length": "length", "eos": "eos"}.get(completion.finish_reason, "max_turns")
                self._finish(session_id, trajectory, ended)
            elif turn.query is not None:
                new_searches.append((session_id, trajectory, turn.query))
                self._emit("search", trajectory, turn.query)
            else:
                self._emit("hint", trajectory, HINT)
                self._go_on(session_id, trajectory, self.codec.hint_ids)
        if new_searches:
            self._search(new_searches)

    def _search(self, new_searches: list[tuple[int | None, Trajectory, str]]) -> None:
        assert self.search_client is not None
        due = self.num_steps + (self.config.search_delay_steps or 0)
        started = time.perf_counter()
        futures = self.search_client.submit([query for _, _, query in new_searches], self.config.topk)
        for (session_id, trajectory, _), future in zip(new_searches, futures, strict=True):
            self.searches.append(_OpenSearch(session_id, trajectory, future, due, started))

    def _wait_for_searches(self) -> None:
        """Nothing can be decoded: until the next documents, or until a group is late."""
        if self.config.search_delay_steps is not None:  # the clock moves to the next observation
            self.num_steps = max(self.num_steps, min(search.due for search in self.searches))
            return
        late_at = None if self.watch is None else self.watch.next_due()
        timeout = None if late_at is None else max(0.0, late_at - self._now()) + 0.001
        wait([search.future for search in self.searches], timeout, return_when=FIRST_COMPLETED)

    def _join_searches(self) -> None:
        """Resumes the trajectories whose documents are there, or due."""
        is_timed = self.config.search_delay_steps is not None
        ready = [
            search
            for search in self.searches
            if (search.due <= self.num_steps if is_timed else search.future.done())
        ]
        for search in sorted(ready, key=lambda search: search.trajectory.row):
            self.searches.remove(search)
            trajectory = search.trajectory
            turn = trajectory.turns[-1]
            try:
                turn.documents = search.future.result()
            except SearchError as error:
                turn.error = str(error)
                trajectory.mask()
                self._finish(search.session_id, trajectory, "search_failed")
                continue
            turn.search_seconds = (search.finished or time.perf_counter()) - search.started
            self._emit("observation", trajectory, documents=turn.documents)
            self._go_on(search.session_id, trajectory, self.codec.observation_ids(turn.documents))

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
        if self.watch is not None:
            self.watch.end(trajectory.row, self._now())
        self._emit("end", trajectory, reason)

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
        for search in [search for search in self.searches if search.trajectory is trajectory]:
            search.future.cancel()
            self.searches.remove(search)
        if not self.keep_partial or trajectory.num_old_turns is not None:
            trajectory.mask()
            self._finish(session_id, trajectory, "cut")
            return
        if session_id is not None:
            begun = self.engine.partial(session_id)
            length = self.codec.stop.settled_length(begun.token_ids)
            trajectory.keep(
                Partial(begun.token_ids[:length], begun.log_probs[:length], begun.version_first),
                self.engine.version,
            )
        self._finish(session_id, trajectory, KEPT)

    def _emit(
        self,
        kind: Literal["text", "search", "observation", "hint", "end"],
        trajectory: Trajectory,
        text: str = "",
        documents: Sequence[FoundDocument] = (),
    ) -> None:
        if self.on_event is not None:
            self.on_event(Event(kind, trajectory.row, text, list(documents)))

    def _show(self, session_id: int, text: str) -> None:
        """Tells `on_event` what a running turn has written since the last time; `text`: all of the turn."""
        new = text[self.shown.get(session_id, 0) :]
        if new and self.on_event is not None:
            self.shown[session_id] = len(text)
            self._emit("text", self.sessions[session_id], new)


class LLMGenerationManager:
    """Runs trajectories on one engine and one search client, which it owns; see the module's docstring."""

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Without a `search_client`, one is made for `config.search_url`; without `do_search` none is needed.
        `on_event` hears what happens as it happens; it needs an engine with `partial`.

        Raises ValueError for lengths that can't work, and for `do_search` without a client and an address.
        """
        if config.do_search and search_client is None:
            if config.search_url is None:
                raise ValueError(
                    "do_search: found true without a search client; expected a SearchClient, or search_url"
                )
            search_client = SearchClient(config.search_url, topk=config.topk)
        self.tokenizer, self.engine, self.config = tokenizer, engine, config
        self.search_client, self.on_event = search_client, on_event
        self.codec = Codec(tokenizer, config)

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto:
        """Generates one trajectory per row.

        Args:
            gen_batch: batch `sampling_seeds` [N] int64; non_tensor_batch `raw_prompt_ids` (list[int]), and if
                there are any `uid` (rows of one prompt, for `straggler_factor`) and `continuation` (None, or
                what `Trajectory.continued` takes); meta_info `do_sample` (False: greedy), `temperature`,
                `top_p`, `top_k`, `validate` (True: stragglers are waited for), `keep_partial` (True:
                stragglers end as "kept", with their mask as if they had ended), all optional.

        Returns:
            The tensors of generation in the table of `verl/protocol.py`, P = max_start_length and
            R = max_prompt_length, which bounds prompt and response together (P and R are the same in every
            process, so that parts can be joined); gen_batch's columns but `continuation`, and `trajectory`:
            `Trajectory.record`. meta_info `metrics`: `retrieval/*` and `rollout/*` figures of this process.
        """
        config, meta_info, columns = self.config, gen_batch.meta_info, gen_batch.non_tensor_batch
        seeds = gen_batch.tensors["sampling_seeds"].tolist()
        prompts = [[int(id_) for id_ in ids[-config.max_start_length :]] for ids in columns["raw_prompt_ids"]]
        trajectories = [
            Trajectory(row, prompt_ids, seed)
            if state is None
            else Trajectory.continued(row, prompt_ids, seed, state)
            for row, (prompt_ids, seed, state) in enumerate(
                zip(prompts, seeds, columns.get("continuation", [None] * len(seeds)), strict=True)
            )
        ]
        sampling: dict[str, Any] = {"temperature": 0.0}
        if meta_info.get("do_sample", True):
            names = ("temperature", "top_p", "top_k", "min_p")
            sampling = {name: meta_info.get(name, getattr(config, name)) for name in names}
        params = SamplingParams(
            max_tokens=config.max_response_length,
            stop=self.codec.stop,
            eos_token_ids=self.codec.eos_token_ids,
            ignore_eos=config.ignore_eos,
            **sampling,
        )
        groups = None if meta_info.get("validate", False) else columns.get("uid")
        before = {} if self.search_client is None else self.search_client.statistics()
        loop = TrajectoryLoop(
            self.codec,
            self.engine,
            self.search_client,
            config,
            params,
            trajectories,
            self.on_event,
            groups=None if groups is None else groups.tolist(),
            keep_partial=meta_info.get("keep_partial", False),
        )
        loop.run()
        tensors = to_tensors(
            trajectories,
            config.max_start_length,
            config.max_prompt_length,
            self.tokenizer.pad_token_id or 0,
        )
        records = [trajectory.record(self.codec.decode(trajectory.prompt_ids)) for trajectory in trajectories]
        non_tensors = {**columns, "trajectory": records}
        non_tensors.pop("continuation", None)
        after = {} if self.search_client is None else self.search_client.statistics()
        metrics = search_metrics(before, after, trajectories) | loop.load.metrics()
        return DataProto.from_dict(
            tensors=tensors, non_tensors=non_tensors, meta_info={"metrics": metrics} if metrics else {}
        )

    def close(self) -> None:
        """Ends the search client."""
        if self.search_client is not None:
            self.search_client.close()


def build_agent(
    config: Config, tokenizer: Any, engine: RolloutEngine, *, api_key: str | None = None
) -> LLMGenerationManager:
    """The agent of a training run from its whole configuration. `api_key`: of the retrieval servers.

    Raises ValueError for an address or a proxy that can't be used.
    """
    data, rollout, retriever = config.data, config.actor_rollout_ref.rollout, config.retriever
    generation = GenerationConfig(
        max_turns=config.max_turns,
        max_start_length=data.max_start_length,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_obs_length=data.max_obs_length,
        topk=retriever.topk,
        do_search=config.do_search,
        search_delay_steps=rollout.search_delay_steps,
        max_in_flight=rollout.max_in_flight,
        straggler_factor=rollout.straggler_factor,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_token_ids=generation_eos_ids(config.actor_rollout_ref.model.path),
    )
    client = None
    if config.do_search:
        client = SearchClient(
            retriever.url,
            topk=retriever.topk,
            timeout=retriever.timeout,
            api_key=api_key,
            use_proxy=retriever.use_proxy,
        )
    return LLMGenerationManager(tokenizer, engine, client, generation)
