"""The HTTP API of an engine: OpenAI's routes, sessions for training, and control of weights.

docs/inference.md describes the routes. Handlers do little, and the engine's thread steps on
(`engine_thread.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from fastapi import Body, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from verl.inference import requests
from verl.inference.engine_thread import EngineTurn, TurnResult
from verl.inference.replies import Chat, Completions, Json, choice_of
from verl.inference.sessions import Run, Sessions
from verl.sessions.engine_contract import checked_weights
from verl.utils.http_border import STREAM_END, ApiError, Guard, answer_errors, as_json, event, unless_gone
from verl.utils.safetensors_file import Shapes, read_weights, shapes_in

COMPLETION_TOKENS = 16  # default of max_tokens for /v1/completions, the same as OpenAI's
SEGMENT = ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions", "turns")


def create_app(sessions: Sessions, model: str, shapes: Shapes, token: str | None = None) -> FastAPI:
    """Create the server of an engine. The engine's thread starts and ends with it.

    Args:
        sessions: The sessions of the engine.
        model: The name of the model that clients use.
        shapes: The shapes of the model's weights.
        token: The bearer token. None means that no token is asked for, and that there are no control routes.
    """
    engine = sessions.engine
    codec = sessions.codec
    counts: Counter[tuple[str, int]] = Counter()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                await asyncio.sleep(min(10.0, sessions.max_idle))
                sessions.drop_old()

        engine.start()
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await engine.close()

    app = FastAPI(title="Inference", lifespan=lifespan)
    app.add_middleware(Guard, token=token, counts=counts)
    answer_errors(app)

    @app.get("/health")
    async def health() -> Response:
        is_healthy = not engine.failure and engine.engine.version >= 0
        status = "healthy" if is_healthy else engine.failure or "the engine has no weights"
        report = {"status": status, "model": model, "version": engine.engine.version, "paused": engine.paused}
        return as_json(report, 200 if is_healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        server_figures = {
            "turns": engine.num_turns,
            "sessions": len(sessions.held),
            "version": engine.engine.version,
        }
        lines = []
        for name, value in (await engine.stats() | server_figures).items():
            lines += [f"# TYPE verl_inference_{name} gauge", f"verl_inference_{name} {value}"]
        lines.append("# TYPE verl_inference_answers_total counter")
        for (route, status), number in counts.items():
            lines.append(f'verl_inference_answers_total{{route="{route}",status="{status}"}} {number}')
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    @app.get("/sessions/{session_id}/v1/models", include_in_schema=False)
    async def models() -> Response:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "verl"}
        return as_json({"object": "list", "data": [entry | {"max_model_len": codec.max_model_len}]})

    def check_model(name: str | None) -> None:
        if name not in (None, model):
            raise ApiError(404, "model_not_found", f"the model here is {model!r}, not {name!r}")

    def turns_of(prompts: list[list[int]], sampling: requests.Sampling, max_tokens: int) -> list[EngineTurn]:
        """Make `n` turns of each prompt.

        Raises ValueError or ApiError if there are too many, or a prompt is too long.
        """
        number = sampling.n or 1
        if len(prompts) * number > requests.MAX_CHOICES:
            problem = f"{len(prompts)} prompts with n={number}"
            raise ValueError(f"{problem}; expected at most {requests.MAX_CHOICES} choices")
        for ids in prompts:
            codec.check_room(len(ids))
        engine.check_room(len(prompts) * number)
        first_seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        params = [sampling.params(codec, first_seed + i, max_tokens) for i in range(number)]
        return [EngineTurn(ids, turn_params) for ids in prompts for turn_params in params]

    async def answer(
        request: Request, turns: list[EngineTurn], answer_format: Completions, run: Run
    ) -> Response:
        """Answer with the ends of the turns in the form that the client has asked for.

        A client that goes away ends its turns.
        """
        if answer_format.request.stream:
            return StreamingResponse(streamed(turns, answer_format, run), media_type="text/event-stream")
        return as_json(answer_format.whole(await unless_gone(request, map(run, turns))))

    @app.post("/inference/v1/generate")
    async def generate(
        request: Request,
        token_ids: Annotated[requests.TokenIds, Body()],
        sampling_params: Annotated[requests.Sampling | None, Body()] = None,
    ) -> Response:
        turns = turns_of([token_ids], sampling_params or requests.Sampling(), codec.max_model_len)
        choices = []
        for index, result in enumerate(await unless_gone(request, map(engine.run, turns))):
            content = [
                {"logprob": log_prob, "model_logprob": model_log_prob}
                for log_prob, model_log_prob in zip(result.log_probs, result.model_log_probs, strict=True)
            ]
            more = {"logprobs": {"content": content}, "versions": result.versions}
            choices.append(choice_of(index, result) | more)
        return as_json({"choices": choices})

    @app.post("/v1/completions")
    async def completions(request: Request, body: requests.CompletionRequest) -> Response:
        check_model(body.model)
        turns = turns_of(body.prompts(codec.encode), body, COMPLETION_TOKENS)
        answer_format = Completions(codec, model, body, [turn.token_ids for turn in turns])
        return await answer(request, turns, answer_format, engine.run)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: requests.ChatRequest) -> Response:
        check_model(body.model)
        ids = codec.prompt_ids(body.history(), body.visible_tools())
        turns = turns_of([ids], body, codec.max_model_len)
        answer_format = Chat(codec, model, body, ids)
        return await answer(request, turns, answer_format, engine.run)

    @app.post("/sessions")
    async def open_session(
        request: Request, uid: Annotated[str | None, Body(embed=True, max_length=1000)] = None
    ) -> Response:
        session_id = sessions.open(uid).session_id
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{session_id}/v1"
        return as_json({"session_id": session_id, "base_url": base_url})

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def session_chat(request: Request, session_id: str, body: requests.ChatRequest) -> Response:
        check_model(body.model)
        turn, answer_format, run = sessions.prepare_turn(
            sessions.find(session_id, unfinished=True), body, model
        )
        return await answer(request, [turn], answer_format, run)

    @app.get("/sessions/{session_id}")
    async def read_session(session_id: str) -> Response:
        session = sessions.find(session_id)
        segments = [
            {name: getattr(segment, name) for name in SEGMENT} for segment in session.transcript.segments
        ]
        state = {"session_id": session_id, "uid": session.uid, "finished": session.outcome is not None}
        outcome = {"reward": None, "turn_rewards": None, "metadata": None} | (session.outcome or {})
        return as_json(state | outcome | {"segments": segments})

    @app.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, body: requests.FinishRequest) -> Response:
        session = sessions.find(session_id, unfinished=True)
        number = sum(len(segment.turns) for segment in session.transcript.segments)
        if body.turn_rewards is not None and len(body.turn_rewards) != number:
            raise ValueError(f"{len(body.turn_rewards)} turn_rewards; the session has {number} turns")
        sessions.finish(session, body.model_dump())
        return as_json({"session_id": session_id, "finished": True})

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        session = sessions.held.pop(sessions.find(session_id).session_id)
        sessions.finish(session, session.outcome or {})
        return as_json({"session_id": session_id, "deleted": True})

    if token is not None:

        @app.post("/pause")
        async def pause(mode: Literal["keep", "wait", "abort"] = "keep") -> Response:
            await engine.pause(mode)
            return as_json({"paused": engine.paused})

        @app.post("/resume")
        async def resume() -> Response:
            await engine.resume()
            return as_json({"paused": engine.paused})

        @app.post("/update_weights")
        async def update_weights(
            weight_dir: Annotated[str, Body()], version: Annotated[int, Body(ge=0, le=requests.MAX_INTEGER)]
        ) -> Response:
            """Load the weights of a folder with *.safetensors files of the whole model."""
            folder = Path(weight_dir)
            folder_shapes = await asyncio.to_thread(shapes_in, folder)
            empty = ((name, torch.empty(shape, device="meta")) for name, shape in folder_shapes.items())
            list(checked_weights(empty, shapes))  # raises ValueError if they are of another model
            await engine.load_weights(read_weights(folder), version)
            return as_json({"version": version})

    return app


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
