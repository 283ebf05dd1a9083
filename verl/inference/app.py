"""The HTTP API of an engine: OpenAI's routes, sessions for training, and control of weights.

    request -> route (a function of this module) -> InferenceServer -> EngineTurn -> engine's thread -> reply

docs/inference.md describes the routes. Handlers do little, and the engine's thread steps on
(`engine_thread.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter, Body, Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from verl.inference import requests
from verl.inference.chat import ChatCodec
from verl.inference.engine_thread import EngineThread, EngineTurn, TurnResult
from verl.inference.replies import Chat, Completions, Json, choice_of, usage_of
from verl.inference.sessions import Run, Sessions
from verl.sessions.engine_contract import checked_weights
from verl.utils.http_border import (
    STREAM_END,
    AnswerCounter,
    ApiError,
    answer_errors,
    as_json,
    event,
    openai_refusal,
    unless_gone,
)
from verl.utils.safetensors_file import Shapes, read_weights, shapes_in
from verl.utils.serving import Door, DoorRules

COMPLETION_TOKENS = 16  # default of max_tokens for /v1/completions, the same as OpenAI's
SEGMENT = ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions", "turns")


@dataclass(frozen=True)
class InferenceServer:
    """The objects that the routes use.

    Attributes:
        sessions: The sessions of the engine.
        model: The name of the model that clients use.
        shapes: The shapes of the model's weights.
        run_settings: The settings of the model's run with which it wants to be asked (ASKED_WITH), if it is
            of a run.
        counts: The number of answers by (route, status).
    """

    sessions: Sessions
    model: str
    shapes: Shapes
    run_settings: dict[str, Any] = field(default_factory=dict)
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def engine(self) -> EngineThread:
        return self.sessions.engine

    @property
    def codec(self) -> ChatCodec:
        return self.sessions.codec

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the engine's thread, and drop old sessions, while the server runs."""
        self.engine.start()
        watching = asyncio.create_task(self._drop_old_sessions())
        try:
            yield
        finally:
            watching.cancel()
            await self.engine.close()

    async def _drop_old_sessions(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, self.sessions.max_idle))
            self.sessions.drop_old()

    @property
    def model_card(self) -> Json:
        """The model as OpenAI's API describes it, with vLLM's `max_model_len`."""
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "verl"}
        return card | {"max_model_len": self.codec.max_model_len, "run_settings": self.run_settings}

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name not in (None, self.model):
            raise ApiError(404, "model_not_found", f"the model here is {self.model!r}, not {name!r}")

    def make_turns(
        self, prompts: list[list[int]], sampling: requests.Sampling, max_tokens: int
    ) -> list[EngineTurn]:
        """Make `n` turns of each prompt.

        Raises ValueError or ApiError if there are too many, or a prompt is too long.
        """
        number = sampling.n or 1
        if len(prompts) * number > requests.MAX_CHOICES:
            problem = f"{len(prompts)} prompts with n={number}"
            raise ValueError(f"{problem}; expected at most {requests.MAX_CHOICES} choices")
        for ids in prompts:
            self.codec.check_room(len(ids))
        self.engine.check_room(len(prompts) * number)
        first_seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        if sampling.max_tokens == 0:  # nothing is sampled, and the engine knows no turn without tokens
            sampling = sampling.model_copy(update={"max_tokens": 1})
        params = [sampling.params(self.codec, first_seed + i, max_tokens) for i in range(number)]
        return [EngineTurn(ids, turn_params) for ids in prompts for turn_params in params]


def create_app(
    sessions: Sessions,
    model: str,
    shapes: Shapes,
    token: str | None = None,
    host: str | None = None,
    run_settings: dict[str, Any] | None = None,
) -> FastAPI:
    """Create the server of an engine. The engine's thread starts and ends with it.

    Args:
        sessions: The sessions of the engine.
        model: The name of the model that clients use.
        shapes: The shapes of the model's weights.
        token: The bearer token. None means that no token is asked for, and that there are no control routes.
        host: The address on which the server listens, if it is known (see `DoorRules`).
        run_settings: The settings of the model's run, as in `InferenceServer`.
    """
    server = InferenceServer(sessions, model, shapes, run_settings or {})
    app = FastAPI(title="Inference", lifespan=server.lifespan)
    app.state.server = server
    app.add_middleware(Door, rules=DoorRules(token, host=host), answer=openai_refusal)
    app.add_middleware(AnswerCounter, counts=server.counts)
    answer_errors(app)
    app.include_router(routes)
    if token is not None:
        app.include_router(control_routes)
    return app


async def _server_of(request: Request) -> InferenceServer:
    server: InferenceServer = request.app.state.server
    return server


ServerOfApp = Annotated[InferenceServer, Depends(_server_of)]
routes = APIRouter()
control_routes = APIRouter()  # for the owner of the token


@routes.get("/health")
async def health(server: ServerOfApp) -> Response:
    is_healthy = not server.engine.failure and server.engine.engine.version >= 0
    status = "healthy" if is_healthy else server.engine.failure or "the engine has no weights"
    report = {
        "status": status,
        "model": server.model,
        "version": server.engine.engine.version,
        "paused": server.engine.paused,
    }
    return as_json(report, 200 if is_healthy else 503)


@routes.get("/metrics")
async def metrics(server: ServerOfApp) -> Response:
    server_figures = {
        "turns": server.engine.num_turns,
        "sessions": len(server.sessions.held),
        "version": server.engine.engine.version,
    }
    lines = []
    for name, value in (await server.engine.stats() | server_figures).items():
        lines += [f"# TYPE verl_inference_{name} gauge", f"verl_inference_{name} {value}"]
    lines.append("# TYPE verl_inference_answers_total counter")
    for (route, status), number in server.counts.items():
        lines.append(f'verl_inference_answers_total{{route="{route}",status="{status}"}} {number}')
    return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")


@routes.get("/v1/models")
@routes.get("/sessions/{session_id}/v1/models", include_in_schema=False)
async def models(server: ServerOfApp) -> Response:
    return as_json({"object": "list", "data": [server.model_card]})


@routes.get("/v1/models/{model:path}")
@routes.get("/sessions/{session_id}/v1/models/{model:path}", include_in_schema=False)
async def one_model(server: ServerOfApp, model: str) -> Response:
    server.check_model(model)
    return as_json(server.model_card)


@routes.post("/inference/v1/generate")
async def generate(server: ServerOfApp, request: Request, body: requests.GenerateRequest) -> Response:
    server.check_model(body.model)
    sampling = body.sampling_params or requests.Sampling()
    turns = server.make_turns([body.token_ids], sampling, server.codec.max_model_len)
    results = await unless_gone(request, map(server.engine.run, turns))
    choices = []
    for index, result in enumerate(results):
        entries = zip(result.token_ids, result.log_probs, result.model_log_probs, strict=True)
        content: list[Json] = [
            {
                "token": f"token_id:{token_id}",  # as vLLM names tokens where ids are asked for
                "logprob": log_prob,
                "model_logprob": model_log_prob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token_id, log_prob, model_log_prob in entries
        ]
        more = {"logprobs": {"content": content}, "versions": result.versions}
        choices.append(choice_of(index, result) | more)
    num_written = sum(len(result.token_ids) for result in results)
    return as_json(
        {
            "request_id": f"generate-{uuid.uuid4().hex}",
            "model": server.model,
            "choices": choices,
            "usage": usage_of(len(body.token_ids), num_written),
        }
    )


@routes.post("/v1/completions")
async def completions(server: ServerOfApp, request: Request, body: requests.CompletionRequest) -> Response:
    server.check_model(body.model)
    turns = server.make_turns(body.prompts(server.codec.encode), body, COMPLETION_TOKENS)
    answer_format = Completions(server.codec, server.model, body, [turn.token_ids for turn in turns])
    samples = body.max_tokens != 0
    run: Run = server.engine.run
    if body.needs_scores or not samples:
        run = partial(server.engine.run_scored, num_most_probable=body.logprobs or 0, samples=samples)
    return await _answer(request, turns, answer_format, run)


@routes.post("/v1/chat/completions")
async def chat(server: ServerOfApp, request: Request, body: requests.ChatRequest) -> Response:
    server.check_model(body.model)
    ids = server.codec.prompt_ids(body.history(), body.visible_tools())
    turns = server.make_turns([ids], body, server.codec.max_model_len)
    answer_format = Chat(server.codec, server.model, body, ids)
    return await _answer(request, turns, answer_format, server.engine.run)


@routes.post("/sessions")
async def open_session(
    server: ServerOfApp,
    request: Request,
    uid: Annotated[str | None, Body(embed=True, max_length=1000)] = None,
) -> Response:
    session_id = server.sessions.open(uid).session_id
    base_url = f"{str(request.base_url).rstrip('/')}/sessions/{session_id}/v1"
    return as_json({"session_id": session_id, "base_url": base_url})


@routes.post("/sessions/{session_id}/v1/chat/completions")
async def session_chat(
    server: ServerOfApp, request: Request, session_id: str, body: requests.ChatRequest
) -> Response:
    server.check_model(body.model)
    turn, answer_format, run = server.sessions.prepare_turn(
        server.sessions.find(session_id, unfinished=True), body, server.model
    )
    return await _answer(request, [turn], answer_format, run)


@routes.get("/sessions/{session_id}")
async def read_session(server: ServerOfApp, session_id: str) -> Response:
    session = server.sessions.find(session_id)
    segments = [{name: getattr(segment, name) for name in SEGMENT} for segment in session.transcript.segments]
    state = {"session_id": session_id, "uid": session.uid, "finished": session.outcome is not None}
    outcome = {"reward": None, "turn_rewards": None, "metadata": None} | (session.outcome or {})
    return as_json(state | outcome | {"segments": segments})


@routes.post("/sessions/{session_id}/finish")
async def finish(server: ServerOfApp, session_id: str, body: requests.FinishRequest) -> Response:
    session = server.sessions.find(session_id, unfinished=True)
    number = sum(len(segment.turns) for segment in session.transcript.segments)
    if body.turn_rewards is not None and len(body.turn_rewards) != number:
        raise ValueError(f"{len(body.turn_rewards)} turn_rewards; the session has {number} turns")
    server.sessions.finish(session, body.model_dump())
    return as_json({"session_id": session_id, "finished": True})


@routes.delete("/sessions/{session_id}")
async def delete(server: ServerOfApp, session_id: str) -> Response:
    session = server.sessions.held.pop(server.sessions.find(session_id).session_id)
    server.sessions.finish(session, session.outcome or {})
    return as_json({"session_id": session_id, "deleted": True})


@control_routes.post("/pause")
async def pause(server: ServerOfApp, mode: Literal["keep", "wait", "abort"] = "keep") -> Response:
    await server.engine.pause(mode)
    return as_json({"paused": server.engine.paused})


@control_routes.post("/resume")
async def resume(server: ServerOfApp) -> Response:
    await server.engine.resume()
    return as_json({"paused": server.engine.paused})


@control_routes.post("/update_weights")
async def update_weights(
    server: ServerOfApp,
    weight_dir: Annotated[str, Body()],
    version: Annotated[int, Body(ge=0, le=requests.MAX_INTEGER)],
) -> Response:
    """Load the weights of a folder with *.safetensors files of the whole model."""
    folder = Path(weight_dir)
    folder_shapes = await asyncio.to_thread(shapes_in, folder)
    empty = ((name, torch.empty(shape, device="meta")) for name, shape in folder_shapes.items())
    list(checked_weights(empty, server.shapes))  # raises ValueError if they are of another model
    await server.engine.load_weights(read_weights(folder), version)
    return as_json({"version": version})


async def _answer(
    request: Request, turns: list[EngineTurn], answer_format: Completions, run: Run
) -> Response:
    """Answer with the ends of the turns in the form that the client has asked for.

    A client that goes away ends its turns.
    """
    if answer_format.request.stream:
        return StreamingResponse(streamed(turns, answer_format, run), media_type="text/event-stream")
    return as_json(answer_format.whole(await unless_gone(request, map(run, turns))))


async def streamed(turns: list[EngineTurn], answer_format: Completions, run: Run) -> AsyncIterator[bytes]:
    """Yield server-sent events of the turns as they go on, until all have ended."""
    news: asyncio.Queue[Iterator[Json] | Exception] = asyncio.Queue()
    results: list[TurnResult] = []

    async def play(index: int, turn: EngineTurn) -> None:
        turn.on_tokens = lambda token_ids: news.put_nowait(answer_format.news(index, token_ids))
        try:
            results.append(await run(turn))
            news.put_nowait(answer_format.ending(index, results[-1]))
        except Exception as error:
            news.put_nowait(error)

    news.put_nowait(answer_format.opening())
    tasks = [asyncio.ensure_future(play(index, turn)) for index, turn in enumerate(turns)]
    try:
        while len(results) < len(turns) or not news.empty():
            chunks = await news.get()
            if isinstance(chunks, Exception):
                raise chunks
            for chunk in chunks:
                yield event(chunk)
        for chunk in answer_format.closing(results):
            yield event(chunk)
        yield STREAM_END
    except Exception as error:  # the status is sent already, so the error becomes an event
        yield event(ApiError.of(error).body)
    finally:
        for task in tasks:
            task.cancel()
