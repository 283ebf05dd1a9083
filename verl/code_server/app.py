"""The code server's HTTP API, as Open-Instruct's: `uvicorn verl.code_server.app:app`, or see __main__.py.

POST /test_program        {"program", "tests": ["assert f(1) == 2", ..], "max_execution_time"}
POST /test_program_stdio  {"program", "tests": [{"input", "output"}, ..], "max_execution_time"}
200  {"results": [1, 0], "runtimes": [0.0004, -1.0]}; with "detail": true also outcomes, sandbox, seconds
POST /run                 {"program", "stdin", "max_execution_time"} -> {"stdout", "outcome", "runtime"}
GET  /health              {"status": "healthy", "sandbox", "queue", "workers"}
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl.code_server.answers import decode_tests
from verl.code_server.supervisor import QueueFull, Supervisor
from verl.code_server.walls import Limits, choose_walls

MAX_BODY_BYTES = 64 << 20
MAX_SECONDS = 3600.0
REFUSALS: dict[int | str, dict[str, Any]] = {
    413: {"description": "The body has more than 64 MiB"},
    422: {"description": "The body has another shape, or the tests can't be decoded"},
    503: {"description": "Too many programs wait: see Retry-After"},
}
log = logging.getLogger("uvicorn.error")

Text = Annotated[Any, WithJsonSchema({"type": "string"})]  # may hold what UTF-8 can't
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


class TestRequest(BaseModel):
    program: Text
    tests: Annotated[Any, Field(description="a list, its JSON text, or base64(zlib(pickle(list)))")]
    max_execution_time: Seconds = 1.0
    detail: bool = False


class RunRequest(BaseModel):
    program: Text
    stdin: Text = ""
    max_execution_time: Seconds = 1.0


@dataclass(frozen=True)
class Settings:
    """sandbox: auto, namespaces, landlock or none. workers: programs at once. allow_packages: that programs
    may import, beside Python's own."""

    sandbox: str = "auto"
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    limits: Limits = field(default_factory=Limits)
    allow_packages: tuple[str, ...] = ()


def create_app(settings: Settings) -> FastAPI:
    """The server; it builds its walls at its start. NoWalls (a ValueError) ends it there."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with contextlib.suppress(PermissionError):  # root's server goes before programs; they run at 0
            os.setpriority(os.PRIO_PROCESS, 0, min(-5, os.getpriority(os.PRIO_PROCESS, 0)))
        walls = choose_walls(settings.sandbox, settings.limits, settings.allow_packages)
        app.state.supervisor = supervisor = Supervisor(walls, settings.workers)
        log.info("code server: %s, %d programs at once", walls.description, settings.workers)
        watch = asyncio.create_task(supervisor.stock.watch(settings.limits.memory_mb << 20))
        try:
            yield
        finally:
            watch.cancel()
            supervisor.stock.close()

    app = FastAPI(title="Code server", lifespan=lifespan)
    app.add_middleware(BoundedBody)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [{"loc": e["loc"], "msg": e["msg"], "type": e["type"]} for e in error.errors()]
        return JSONResponse(jsonable(problems), 422)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        supervisor: Supervisor = app.state.supervisor
        sizes = {"queue": supervisor.queue, "workers": supervisor.workers}
        return {"status": "healthy", "sandbox": supervisor.walls.tier, **sizes}

    @app.post("/test_program", responses=REFUSALS)
    async def test_program(request: TestRequest) -> dict[str, Any]:
        return await test(request, stdio=False)

    @app.post("/test_program_stdio", responses=REFUSALS)
    async def test_program_stdio(request: TestRequest) -> dict[str, Any]:
        return await test(request, stdio=True)

    async def test(request: TestRequest, stdio: bool) -> dict[str, Any]:
        supervisor: Supervisor = app.state.supervisor
        check_text(request.program, "program")
        try:
            decode = (
                asyncio.to_thread if isinstance(request.tests, str) and len(request.tests) > 1 << 16 else None
            )
            tests = await decode(decode_tests, request.tests) if decode else decode_tests(request.tests)
        except ValueError as error:
            raise HTTPException(422, str(error).encode(errors="replace").decode()) from None
        try:
            report = await supervisor.test(request.program, tests, request.max_execution_time, stdio)
        except QueueFull:
            raise queue_is_full() from None
        reply: dict[str, Any] = {
            "results": [int(outcome == "passed") for outcome in report.outcomes],
            "runtimes": report.runtimes,
        }
        if request.detail:
            more = {"outcomes": report.outcomes, "sandbox": supervisor.walls.tier, "seconds": report.seconds}
            reply.update(more)
        return reply

    @app.post("/run", responses=REFUSALS)
    async def run(request: RunRequest) -> dict[str, Any]:
        supervisor: Supervisor = app.state.supervisor
        check_text(request.program, "program")
        check_text(request.stdin, "stdin")
        try:
            output, outcome, runtime = await supervisor.run(
                request.program, request.stdin, request.max_execution_time
            )
        except QueueFull:
            raise queue_is_full() from None
        return {"stdout": output, "outcome": outcome, "runtime": runtime}

    return app


def check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise HTTPException(422, f"{name}: found a {type(value).__name__}, expected text")


def queue_is_full() -> HTTPException:
    return HTTPException(503, "Too many programs wait; ask again.", {"Retry-After": "1"})


def jsonable(problems: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of a 422, without what the request held: it may be no JSON."""
    return {
        "detail": [
            {**p, "loc": [str(part).encode(errors="replace").decode() for part in p["loc"]]} for p in problems
        ]
    }


class BoundedBody:
    """Refuses bodies above MAX_BODY_BYTES with 413, by their header or as they arrive."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        num_bytes, messages = 0, []
        too_large = not length.isdigit() or int(length) > MAX_BODY_BYTES
        while not too_large:
            message = await receive()
            messages.append(message)
            num_bytes += len(message.get("body", b""))
            too_large = num_bytes > MAX_BODY_BYTES
            if not message.get("more_body"):
                break
        if too_large:
            refusal = JSONResponse({"detail": f"The body has more than {MAX_BODY_BYTES} bytes"}, 413)
            await refusal(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)


app = create_app(Settings())
