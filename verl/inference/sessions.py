"""The sessions that a server holds: episodes that clients play, until they are deleted or too old."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from verl.inference.chat import ChatCodec, Transcript
from verl.inference.engine_thread import EngineThread, EngineTurn, TurnResult
from verl.inference.replies import Chat
from verl.inference.requests import ChatRequest
from verl.utils.http_border import ApiError

Run = Callable[[EngineTurn], Coroutine[Any, Any, TurnResult]]


@dataclass(eq=False)
class AgentSession:
    """An episode.

    Attributes:
        session_id: The name of the session.
        uid: The client's name for it, if it gave one.
        transcript: What its model has read and written.
        outcome: reward, turn_rewards and metadata, or None if it is not finished.
        last_used: The time of its last use, by `time.monotonic`.
        under_way: The tasks of its turns under way.
    """

    session_id: str
    uid: str | None
    transcript: Transcript = field(default_factory=Transcript)
    outcome: dict[str, Any] | None = None
    last_used: float = field(default_factory=time.monotonic)
    under_way: set[asyncio.Task[TurnResult]] = field(default_factory=set)


class Sessions:
    """The sessions of a server."""

    def __init__(self, engine: EngineThread, codec: ChatCodec, max_sessions: int, max_idle: float) -> None:
        """Create an empty set of sessions.

        Args:
            engine: The thread of the engine.
            codec: The tokenizer's side of the API.
            max_sessions: Maximum number of sessions that are held at once, finished ones included.
            max_idle: Number of seconds without use after which a session is dropped.
        """
        self.engine = engine
        self.codec = codec
        self.max_sessions = max_sessions
        self.max_idle = max_idle
        self.held: dict[str, AgentSession] = {}

    def open(self, uid: str | None) -> AgentSession:
        if len(self.held) >= self.max_sessions:
            raise ApiError(429, "too_many_sessions", f"{len(self.held)} sessions held; delete some or wait")
        session = AgentSession(secrets.token_hex(16), uid)
        self.held[session.session_id] = session
        return session

    def find(self, session_id: str, unfinished: bool = False) -> AgentSession:
        """Return a session.

        Raises ApiError 404 if there is none, and ApiError 409 if it is finished but has to be unfinished.
        """
        session = self.held.get(session_id)
        if session is None:
            message = f"no session {session_id!r}: it was dropped, or never opened"
            raise ApiError(404, "session_not_found", message)
        session.last_used = time.monotonic()
        if unfinished and session.outcome is not None:
            raise ApiError(409, "session_finished", f"session {session_id} is finished")
        return session

    def finish(self, session: AgentSession, outcome: dict[str, Any]) -> None:
        """Finish a session.

        Nothing of it stays in the engine, and its turns under way end without a result.
        """
        session.outcome = outcome
        for task in session.under_way:
            task.cancel()
        segments = session.transcript.segments
        self.engine.close_sessions([segment.engine_session for segment in segments])
        for segment in segments:
            segment.engine_session = None

    def drop_old(self) -> None:
        limit = time.monotonic() - self.max_idle
        for session in list(self.held.values()):
            if session.last_used <= limit and not session.under_way:
                self.finish(self.held.pop(session.session_id), session.outcome or {})

    def prepare_turn(
        self, session: AgentSession, request: ChatRequest, model: str
    ) -> tuple[EngineTurn, Chat, Run]:
        """Return a request's turn, the form of its answer, and the function that runs it.

        The turn goes on with the engine's session of its segment, or opens one with all the segment's tokens.

        Raises:
            ValueError: If `n` is not 1, the session has too many segments, or the template refuses the
                messages.
            ApiError: If the messages or the turn have no room, or the engine has failed.
        """
        if request.n not in (None, 1):
            raise ValueError(f"n is {request.n}; a session is one line of play: expected 1")
        self.engine.check_room()
        segment = session.transcript.take_segment(self.codec, request.history(), request.visible_tools())
        new_ids = segment.new_ids
        old_ids = segment.prompt_ids + segment.response_ids
        all_ids = old_ids if segment.is_new else old_ids + new_ids
        is_resumed = segment.engine_session is not None
        num_drawn = 0 if is_resumed else sum(segment.response_mask)
        seed = segment.seed if request.seed is None else request.seed
        params = request.params(self.codec, seed, self.codec.max_model_len, num_drawn)
        turn = EngineTurn(
            new_ids if is_resumed else all_ids, params, segment.engine_session, keeps_session=True
        )
        answer_format = Chat(self.codec, model, request, all_ids)

        async def run(turn: EngineTurn) -> TurnResult:
            task = asyncio.ensure_future(self.engine.run(turn))
            session.under_way.add(task)
            try:
                result = await task
            except BaseException as error:
                # The engine's session holds a turn that nobody has seen, or it is closed already.
                self.engine.close_sessions([segment.engine_session])
                segment.engine_session = None
                session.transcript.put_back(segment)
                if isinstance(error, asyncio.CancelledError) and session.outcome is not None:
                    raise ApiError(409, "session_finished", "the session was finished meanwhile") from None
                raise
            finally:
                session.under_way.discard(task)
                session.last_used = time.monotonic()
            segment.engine_session = result.session_id
            session.transcript.add(segment, result, answer_format.reply(result))
            return result

        return turn, answer_format, run
