"""The thread that owns a rollout engine and steps it, while asyncio's handlers give it orders.

    run(turn) -> order --between two steps--> open | resume -> engine.step -> Completion -> TurnResult
                 pause, resume, load_weights, close: orders too

Handlers leave an order and await the end of a turn. A step waits for no handler: a stream gets its next
tokens when it has taken the last ones.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.environments.calls import complete_future
from verl.sessions.engine_contract import Completion, RolloutEngine, SamplingParams, Scores
from verl.utils.http_border import ApiError

JOIN_SECONDS = 10.0
ABORTED = "abort"  # the finish_reason of a turn that a pause has ended


class TurnResult(NamedTuple):
    """A turn that ended.

    The lists have an entry for each sampled token.

    Attributes:
        token_ids: The sampled tokens.
        log_probs: Log-probs under the distribution that was sampled from.
        model_log_probs: Log-probs under the model itself.
        versions: Versions of the weights that sampled the tokens.
        finish_reason: The reason as in `Completion`, or ABORTED.
        stop_string: The stop string that ended the turn, if one did.
        session_id: The engine's session, which can be resumed, or None if it is closed.
        scores: The scores of prompt and turn together, where a request asks for them.
    """

    token_ids: list[int]
    log_probs: list[float]
    model_log_probs: list[float]
    versions: list[int]
    finish_reason: str
    stop_string: str | None
    session_id: int | None
    scores: Scores | None = None


@dataclass(eq=False)
class EngineTurn:
    """A turn to be run.

    Attributes:
        token_ids: A prompt, or the tokens that follow in the engine's session `session_id`.
        params: The sampling of the turn.
        session_id: The engine's session. None means that the turn opens one.
        keeps_session: Whether the session stays open when the turn has ended.
        on_tokens: Called in the event loop with all tokens of the turn so far.
        ended: The future of the result.
        updates: For each update of the weights during the turn, (number of tokens at that time, version until
            then).
        num_shown: Number of tokens that were passed to the event loop.
        is_showing: Whether the event loop has not yet taken the last tokens passed to it.
    """

    token_ids: list[int]
    params: SamplingParams
    session_id: int | None = None
    keeps_session: bool = False
    on_tokens: Callable[[list[int]], None] | None = None
    ended: Future[TurnResult] = field(default_factory=Future)
    updates: list[tuple[int, int]] = field(default_factory=list)
    num_shown: int = 0
    is_showing: bool = False

    def show(self, token_ids: list[int]) -> None:
        self.is_showing = False
        if self.on_tokens is not None and not self.ended.done():
            self.on_tokens(token_ids)


class EngineThread:
    """The thread of an engine that any number of handlers use.

    Methods without a leading underscore are called in one event loop.

    Attributes:
        num_turns: Number of turns that wait or are under way.
        paused: The mode of the present pause, or None.
        failure: The reason why no turn can be run any more, or "".
        ended_well: False if the engine has failed.
    """

    def __init__(
        self, engine: RolloutEngine, max_turns: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Create the thread, which `start` starts.

        Args:
            engine: The engine, which has weights.
            max_turns: Maximum number of turns that wait or are under way.
            on_failure: Called in the event loop when the engine has failed.
        """
        self.engine = engine
        self.max_turns = max_turns
        self.on_failure = on_failure
        self.num_turns = 0
        self.failure = ""
        self.ended_well = True
        self.paused: str | None = None
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_closing = False
        self._held: list[EngineTurn] = []  # turns that wait until the pause ends
        self._live: dict[int, EngineTurn] = {}  # by the engine's session
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread and the engine. Turns that are left fail."""
        self._is_closing = True
        self._orders.put(lambda: None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def check_room(self, num_turns: int = 1) -> None:
        """Raise ApiError if the engine has failed, or if this many more turns are too many."""
        self._check_failure()
        if self.num_turns + num_turns > self.max_turns:
            raise ApiError(429, "server_full", f"{self.num_turns} turns are waiting or under way; ask again")

    async def run(self, turn: EngineTurn) -> TurnResult:
        """Run a turn to its end. A cancelled turn leaves nothing in the engine.

        Raises:
            ValueError: If the engine refuses the turn.
            ApiError: If the engine has failed, or there are too many turns.
        """
        self.check_room()
        self.num_turns += 1
        try:
            self._orders.put(partial(self._begin, turn))
            return await asyncio.wrap_future(turn.ended)
        except asyncio.CancelledError:
            self._orders.put(partial(self._cancel, turn))
            raise
        finally:
            self.num_turns -= 1

    async def run_scored(self, turn: EngineTurn, num_most_probable: int, samples: bool) -> TurnResult:
        """Run a turn, if it `samples`, and score its prompt and its tokens. Raises what `run` raises."""
        result = TurnResult([], [], [], [], "length", None, None)
        if samples:
            result = await self.run(turn)
        else:
            self.check_room()
        token_ids = turn.token_ids + result.token_ids
        self.num_turns += 1
        try:
            scores = await self._ask(partial(self.engine.score, token_ids, num_most_probable))
        finally:
            self.num_turns -= 1
        return result._replace(scores=scores)

    def close_sessions(self, session_ids: Iterable[int | None]) -> None:
        """Close those of the engine's sessions that have no turn under way."""
        self._orders.put(partial(self._close, list(session_ids)))

    async def pause(self, mode: str) -> None:
        """Pause the engine, and return when the pause is in force.

        Turns that have not begun wait until `resume`.

        Args:
            mode: What happens to turns under way: "keep" (they stand still), "wait" (they end first) or
                "abort" (they end as they are, with the reason ABORTED).
        """

        def take() -> list[Future[TurnResult]]:
            self.paused = mode
            under_way = [turn.ended for turn in self._live.values()]
            while mode == "abort" and self._live:
                session_id, turn = self._live.popitem()
                turn.keeps_session = False
                version = self.engine.version
                ids, log_probs, _ = self.engine.partial(session_id)
                completion = Completion(session_id, ids, log_probs, [], ABORTED, None, version, version)
                complete_future(turn.ended, self._result(turn, completion))
            return under_way

        under_way = await self._ask(take)
        if mode == "wait" and under_way:
            await asyncio.wait([asyncio.wrap_future(ended) for ended in under_way])

    async def resume(self) -> None:
        def take() -> None:
            self.paused = None
            held_turns = self._held
            self._held = []
            for turn in held_turns:
                self._begin(turn)

        await self._ask(take)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights between two steps. Turns under way go on with the new weights.

        Errors of `RolloutEngine.load_weights` and of the iteration are raised here. Turns then wait until
        weights are loaded.
        """

        def take() -> None:
            for session_id, turn in self._live.items():
                turn.updates.append((len(self.engine.partial(session_id).token_ids), self.engine.version))
            self.engine.load_weights(weights, version)

        await self._ask(take)

    async def stats(self) -> dict[str, float]:
        return await self._ask(self.engine.stats)

    async def _ask(self, question: Callable[[], Any]) -> Any:
        """Return or raise what an order returns or raises."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                self._check_failure()
                complete_future(answer, question())
            except Exception as error:  # the handler that asked receives it, and the engine goes on
                complete_future(answer, error=error)

        self._orders.put(run)
        return await asyncio.wrap_future(answer)

    def _check_failure(self) -> None:
        if self.failure:
            raise ApiError(503, "engine_failed", self.failure)

    # -------------------------------------------------------------------------------------- in the thread

    def _serve(self) -> None:
        failure = "the server ends"
        try:
            with torch.no_grad():
                while not self._is_closing:
                    runs = self.paused != "keep" and self.engine.version >= 0 and self.engine.has_runnable
                    if runs and self._orders.empty():
                        self._step()
                    else:
                        self._orders.get()()
        except BaseException:
            traceback.print_exc()
            self.ended_well = False
            failure = "the engine has failed; see the server's log"
            self._tell(self.on_failure)
        self.failure = failure
        for turn in [*self._live.values(), *self._held]:
            complete_future(turn.ended, error=ApiError(503, "engine_failed", failure))
        self.engine.shutdown()
        while not self._is_closing or not self._orders.empty():  # each further order gets the failure
            self._orders.get()()

    def _step(self) -> None:
        for completion in self.engine.step():
            turn = self._live.pop(completion.session_id)
            complete_future(turn.ended, self._result(turn, completion))
        for session_id, turn in self._live.items():
            if turn.on_tokens is not None and not turn.is_showing:
                token_ids = self.engine.partial(session_id).token_ids
                if len(token_ids) > turn.num_shown:
                    turn.is_showing = True
                    turn.num_shown = len(token_ids)
                    self._tell(turn.show, token_ids)

    def _result(self, turn: EngineTurn, ended: Completion) -> TurnResult:
        ids = ended.token_ids
        versions = list[int]()
        for length, version in [*turn.updates, (len(ids), ended.version_last)]:
            versions += [version] * (length - len(versions))
        if not turn.keeps_session:
            self.engine.close(ended.session_id)
        session_id = ended.session_id if turn.keeps_session else None
        log_probs = (ended.log_probs, ended.model_log_probs)
        return TurnResult(ids, *log_probs, versions, ended.finish_reason, ended.stop_string, session_id)

    def _begin(self, turn: EngineTurn) -> None:
        if turn.ended.done():  # cancelled
            return
        try:
            self._check_failure()
            if self.paused is not None:
                self._held.append(turn)
                return
            if turn.session_id is None:
                turn.session_id = self.engine.open(turn.token_ids, turn.params)
            else:
                self.engine.resume(turn.session_id, turn.token_ids, turn.params)
            self._live[turn.session_id] = turn
        except (ApiError, ValueError) as error:
            complete_future(turn.ended, error=error)

    def _cancel(self, turn: EngineTurn) -> None:
        if turn in self._held:
            self._held.remove(turn)
        if turn.session_id is not None and self._live.get(turn.session_id) is turn:
            del self._live[turn.session_id]
        self._close([turn.session_id])

    def _close(self, session_ids: Iterable[int | None]) -> None:
        for session_id in session_ids:
            if session_id is not None and session_id not in self._live:
                with suppress(ValueError):  # it is closed, or the engine has failed
                    self.engine.close(session_id)

    def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the event loop call a function."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
