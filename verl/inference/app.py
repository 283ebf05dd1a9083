"""The HTTP API of an engine: OpenAI's routes, sessions for training, and control of weights.

    GET  /health /metrics /v1/models      POST /v1/completions  /v1/chat/completions  /inference/v1/generate
    POST /sessions {uid?} -> {session_id, base_url}: what an unmodified client takes as its base_url
    POST /sessions/ID/v1/chat/completions    GET, DELETE /sessions/ID    POST /sessions/ID/finish {reward, ..}
    POST /pause?mode=keep|wait|abort  /resume  /update_weights {weight_dir, version}    with a token alone

docs/inference.md describes them. Handlers do little; the engine's thread steps on (`engine_thread.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from verl.inference.chat import ChatCodec, ContextTooLong, Place, Transcript
from verl.inference.engine_thread import EngineFailed, EngineThread, EngineTurn, TooManyTurns, TurnResult
from verl.inference.replies import Chat, Completions, choice_of
from verl.inference.requests import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    FinishRequest,
    GenerateRequest,
    Sampling,
    SessionRequest,
    UpdateRequest,
)
from verl.inference.weights import Shapes, check_same, read_weights, shapes_in

MAX_BODY_BYTES = 64 << 20
COMPLETION_TOKENS = 16  # of /v1/completions, where the client says nothing, as OpenAI has it
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "What the request asks for can't be done",
        401: "The bearer token is missing or wrong",
        404: "There is no such session or model",
        409: "The session is finished",
        413: "The body is too large",
        429: "The server is full: see Retry-After",
        503: "The engine has failed, or has no weights",
    }.items()
}


class Refusal(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class ServerSettings:
    """model: the name that clients use. token: the bearer token; None: none is asked for, and there are no
    control routes. max_sessions: that are held at once, finished ones too. session_seconds: after which an
    idle one is dropped.
    """

    model: str
    token: str | None = None
    max_sessions: int = 4096
    session_seconds: float = 3600.0


@dataclass(eq=False)
class AgentSession:
    """An episode that some client plays."""

    session_id: str
    uid: str | None
    transcript: Transcript = field(default_factory=Transcript)
    outcome: dict[str, Any] | None = None  # reward, turn_rewards, metadata; None: it is not finished
    last_used: float = field(default_factory=time.monotonic)
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)


class Sessions:
    """Those that are held; they end by age, in the order of their last use."""

    def __init__(self, engine: EngineThread, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.held: dict[str, AgentSession] = {}  # the one used longest ago first

    def open(self, uid: str | None) -> AgentSession:
        self.drop_old()
        if len(self.held) >= self.settings.max_sessions:
            raise Refusal(
                429, "too_many_sessions", f"{len(self.held)} sessions are open; delete some, or wait"
            )
        session = AgentSession(secrets.token_hex(16), uid)
        self.held[session.session_id] = session
        return session

    def find(self, session_id: str, unfinished: bool = False) -> AgentSession:
        """Refusal 404; 409: it is finished, and must not be."""
        self.drop_old()
        session = self.held.pop(session_id, None)
        if session is None:
            raise Refusal(
                404, "session_not_found", f"no session {session_id!r}: it was dropped, or never opened"
            )
        session.last_used = time.monotonic()
        self.held[session_id] = session
        if unfinished and session.outcome is not None:
            raise Refusal(409, "session_finished", f"session {session_id} is finished")
        return session

    def end(self, session: AgentSession) -> None:
        """Nothing of it stays in the engine; its turns under way end without a result."""
        for task in session.under_way:
            task.cancel()
        segments = session.transcript.segments
        self.engine.close_sessions([s.engine_session for s in segments if s.engine_session is not None])
        for segment in segments:
            segment.engine_session = None

    def drop_old(self) -> None:
        limit = time.monotonic() - self.settings.session_seconds
        for session in list(self.held.values()):
            if session.last_used > limit:
                break
            if not session.under_way:
                self.end(self.held.pop(session.session_id))


class Guard:
    """ASGI: bodies have a limit, and with a token all but /health need it."""

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.expected = app, None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.expected is not None and scope["path"] != "/health":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                refusal = Refusal(401, "invalid_api_key", "expected the header Authorization: Bearer <token>")
                await error_response(refusal, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        num_bytes = 0

        async def limited() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        await self.app(scope, limited, send)


def create_app(engine: EngineThread, codec: ChatCodec, settings: ServerSettings, shapes: Shapes) -> FastAPI:
    """The server of an engine whose thread starts and ends with it. shapes: of the model's weights."""
    sessions = Sessions(engine, settings)
    counts: dict[tuple[str, int], int] = {}  # answers by route and status

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()

        async def watch() -> None:
            while True:
                await asyncio.sleep(min(10.0, settings.session_seconds))
                sessions.drop_old()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await engine.close()

    app = FastAPI(title="Inference", lifespan=lifespan, responses=REFUSALS)
    app.add_middleware(Guard, token=settings.token)

    @app.middleware("http")
    async def count(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        route = request.scope.get("route")
        key = (getattr(route, "path", "other"), response.status_code)
        counts[key] = counts.get(key, 0) + 1
        return response

    @app.exception_handler(Refusal)
    async def refuse(request: Request, error: Refusal) -> Response:
        return error_response(error)

    @app.exception_handler(StarletteHTTPException)
    async def refuse_http(request: Request, error: StarletteHTTPException) -> Response:
        return error_response(Refusal(error.status_code, "invalid_request", str(error.detail)), error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
        return error_response(Refusal(400, "invalid_request", "; ".join(problems)))

    @app.exception_handler(ContextTooLong)
    async def refuse_length(request: Request, error: ContextTooLong) -> Response:
        return error_response(Refusal(400, "context_length_exceeded", str(error)))

    @app.exception_handler(ValueError)
    async def refuse_value(request: Request, error: ValueError) -> Response:
        return error_response(Refusal(400, "invalid_request", str(error)))

    @app.exception_handler(TooManyTurns)
    async def refuse_turns(request: Request, error: TooManyTurns) -> Response:
        message = f"{engine.num_turns} turns are waiting or under way; ask again"
        return error_response(Refusal(429, "server_full", message))

    @app.exception_handler(EngineFailed)
    async def refuse_failed(request: Request, error: EngineFailed) -> Response:
        return error_response(Refusal(503, "engine_failed", str(error)))

    # ---------------------------------------------------------------------------------------- what there is

    @app.get("/health")
    async def health() -> Response:
        works = not engine.failure and engine.engine.version >= 0
        status = "healthy" if works else "no weights" if not engine.failure else "failed"
        about = {"status": status, "model": settings.model, "version": engine.engine.version}
        return as_json(about | {"paused": engine.paused}, 200 if works else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        figures = await engine.stats() | {
            "turns": engine.num_turns,
            "sessions": len(sessions.held),
            "weight_version": engine.engine.version,
        }
        lines = [f"verl_inference_{name} {value}" for name, value in figures.items()]
        for (route, status), number in counts.items():
            lines.append(f'verl_inference_answers{{route="{route}",status="{status}"}} {number}')
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    @app.get("/sessions/{session_id}/v1/models", include_in_schema=False)
    async def models() -> Response:
        about = {"id": settings.model, "object": "model", "created": 0, "owned_by": "verl"}
        return as_json({"object": "list", "data": [about | {"max_model_len": codec.max_model_len}]})

    # --------------------------------------------------------------------------------------------- requests

    def check_model(name: str | None) -> None:
        if name not in (None, settings.model):
            raise Refusal(404, "model_not_found", f"the model here is {settings.model!r}, not {name!r}")

    def turns_of(prompts: list[list[int]], given: Sampling, max_tokens: int) -> list[EngineTurn]:
        """`n` turns of each prompt."""
        number = given.n or 1
        if len(prompts) * number > MAX_CHOICES:
            raise ValueError(
                f"{len(prompts)} prompts with n={number}; expected at most {MAX_CHOICES} choices"
            )
        for ids in prompts:
            codec.check_room(len(ids))
        first = secrets.randbits(62) if given.seed is None else given.seed
        turns = []
        for ids in prompts:
            for index in range(number):
                params = given.model_copy(update={"seed": first + index}).params(codec, 0, max_tokens)
                turns.append(EngineTurn(ids, params))
        engine.check_room(len(turns))
        return turns

    async def answer(
        request: Request,
        turns: list[EngineTurn],
        form: Completions,
        run: Callable[[EngineTurn], Any],
        stream: bool | None,
    ) -> Response:
        """The turns' ends in the form that the client has asked for. A client that goes away ends its
        turns.
        """
        if stream:
            return StreamingResponse(streamed(turns, form, run), media_type="text/event-stream")

        async def whole() -> Response:
            results = await asyncio.gather(*map(run, turns))
            return as_json(form.whole(results))

        return await unless_gone(request, whole())

    @app.post("/inference/v1/generate")
    async def generate(request: Request, given: GenerateRequest) -> Response:
        turns = turns_of([given.token_ids], given.sampling_params, codec.max_model_len)

        async def whole() -> Response:
            results = await asyncio.gather(*map(engine.run, turns))
            log_probs = [
                {"logprobs": {"content": [{"logprob": p} for p in each.log_probs]}} for each in results
            ]
            choices = [
                choice_of(i, each) | p for i, (each, p) in enumerate(zip(results, log_probs, strict=True))
            ]
            return as_json({"choices": choices})

        return await unless_gone(request, whole())

    @app.post("/v1/completions")
    async def completions(request: Request, given: CompletionRequest) -> Response:
        check_model(given.model)
        turns = turns_of(given.prompts(codec.encode), given, COMPLETION_TOKENS)
        form = Completions(codec, settings.model, given, [turn.token_ids for turn in turns])
        return await answer(request, turns, form, engine.run, given.stream)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, given: ChatRequest) -> Response:
        check_model(given.model)
        tools = given.told_tools()
        ids = codec.prompt_ids(given.history(), tools)
        turns = turns_of([ids], given, codec.max_model_len)
        return await answer(request, turns, Chat(codec, settings.model, given, ids), engine.run, given.stream)

    # --------------------------------------------------------------------------------------------- sessions

    @app.post("/sessions")
    async def open_session(request: Request, given: SessionRequest | None = None) -> Response:
        session = sessions.open(given.uid if given else None)
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{session.session_id}/v1"
        return as_json({"session_id": session.session_id, "base_url": base_url})

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def session_chat(request: Request, session_id: str, given: ChatRequest) -> Response:
        check_model(given.model)
        session = sessions.find(session_id, unfinished=True)
        if given.n not in (None, 1):
            raise ValueError(f"n is {given.n}; a session is one line of play: expected 1")
        engine.check_room()
        transcript = session.transcript
        place = transcript.place(codec, given.history(), given.told_tools())
        segment = place.segment
        turn = turn_in_session(place, given)
        before = [] if place.is_new else [*segment.prompt_ids, *segment.response_ids]
        form = Chat(codec, settings.model, given, [*before, *place.new_ids])

        async def run(turn: EngineTurn) -> TurnResult:
            task = asyncio.ensure_future(engine.run(turn))
            session.under_way.add(task)
            try:
                result = await task
            except BaseException as error:
                segment.engine_session = None  # it holds a turn that nobody has seen, or is gone
                transcript.put_back(place)
                if isinstance(error, asyncio.CancelledError) and session.outcome is not None:
                    raise Refusal(409, "session_finished", "the session was finished meanwhile") from None
                raise
            finally:
                session.under_way.discard(task)
                session.last_used = time.monotonic()
            segment.engine_session = result.session_id
            reply = form.reply(result)
            transcript.add(place, result.token_ids, result.log_probs, result.versions, reply)
            return result

        return await answer(request, [turn], form, run, given.stream)

    def turn_in_session(place: Place, given: Sampling) -> EngineTurn:
        """Goes on with the engine's session of the segment, or with one of its own on all its tokens."""
        segment = place.segment
        if segment.engine_session is not None:
            params = given.params(codec, segment.seed, codec.max_model_len)
            return EngineTurn(place.new_ids, params, segment.engine_session, keeps=True)
        params = given.params(codec, segment.seed, codec.max_model_len, sum(segment.response_mask))
        before = [] if place.is_new else [*segment.prompt_ids, *segment.response_ids]
        return EngineTurn([*before, *place.new_ids], params, keeps=True)

    @app.get("/sessions/{session_id}")
    async def read_session(session_id: str) -> Response:
        session = sessions.find(session_id)
        names = ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions", "turns")
        segments = [{name: getattr(each, name) for name in names} for each in session.transcript.segments]
        outcome = {"reward": None, "turn_rewards": None, "metadata": None} | (session.outcome or {})
        about = {"session_id": session_id, "uid": session.uid, "finished": session.outcome is not None}
        return as_json(about | outcome | {"segments": segments})

    @app.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, given: FinishRequest) -> Response:
        session = sessions.find(session_id, unfinished=True)
        number = session.transcript.num_turns
        if given.turn_rewards is not None and len(given.turn_rewards) != number:
            raise ValueError(f"{len(given.turn_rewards)} turn_rewards; the session has {number} turns")
        session.outcome = given.model_dump()
        sessions.end(session)
        return as_json({"session_id": session_id, "finished": True})

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        session = sessions.find(session_id)
        session.outcome = session.outcome or {}
        sessions.end(sessions.held.pop(session_id))
        return as_json({"session_id": session_id, "deleted": True})

    # ---------------------------------------------------------------------------------------------- control

    if settings.token is not None:

        @app.post("/pause")
        async def pause(request: Request, mode: Literal["keep", "wait", "abort"] = "keep") -> Response:
            await engine.pause(mode)
            return as_json({"paused": engine.paused})

        @app.post("/resume")
        async def resume() -> Response:
            await engine.resume()
            return as_json({"paused": engine.paused})

        @app.post("/update_weights")
        async def update_weights(given: UpdateRequest) -> Response:
            folder = Path(given.weight_dir).expanduser()
            check_same(await asyncio.to_thread(shapes_in, folder), shapes)
            await engine.load_weights(read_weights(folder), given.version)
            return as_json({"version": given.version})

    return app


async def streamed(
    turns: list[EngineTurn], form: Completions, run: Callable[[EngineTurn], Coroutine[Any, Any, TurnResult]]
) -> AsyncIterator[bytes]:
    """Server-sent events of the turns as they go on, until all have ended."""
    news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    tasks: list[asyncio.Task[TurnResult]] = []

    def tell(index: int, what: Any) -> None:
        news.put_nowait((index, what))

    try:
        for index, turn in enumerate(turns):
            turn.on_tokens = partial(tell, index)
            task = asyncio.ensure_future(run(turn))
            task.add_done_callback(partial(tell, index))
            tasks.append(task)
        left = len(turns)
        results: list[TurnResult] = []
        for chunk in form.opening():
            yield _event(chunk)
        while left:
            index, what = await news.get()
            if not isinstance(what, asyncio.Future):
                chunks = form.news(index, what)
            elif (error := what.exception()) is None:
                left -= 1
                results.append(what.result())
                chunks = form.ending(index, what.result())
            else:
                refusal = error if isinstance(error, Refusal) else Refusal(503, "engine_failed", str(error))
                yield _event(error_object(refusal))
                return
            for chunk in chunks:
                yield _event(chunk)
        for chunk in form.closing(results):
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's result; it is cancelled if the client goes away."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        task.cancel()
        leaving.cancel()


def as_json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_object(error: Refusal) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "code": error.code, "param": None}}


def error_response(error: Refusal, headers: Any = None) -> Response:
    given = dict(headers or {}) | ({"Retry-After": "1"} if error.status == 429 else {})
    return Response(orjson.dumps(error_object(error)), error.status, given, "application/json")
