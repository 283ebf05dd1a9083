"""The code server's HTTP API, which is Open-Instruct's.

Start it with `python -m verl.code_server` (__main__.py), or with uvicorn's own command. That waits for ever
for the rest of a head unless it is told otherwise:

    uvicorn verl.code_server.app:app --http verl.utils.serving:BoundedHeadProtocol

POST /test_program        {"program", "tests": ["assert f(1) == 2", ..], "max_execution_time"}
POST /test_program_stdio  {"program", "tests": [{"input", "output"}, ..], "max_execution_time"}
200  {"results": [1, 0], "runtimes": [0.0004, -1.0]}; with "detail": true more of each
POST /run                 {"program", "stdin", "max_execution_time"} -> {"stdout", "outcome", "runtime"}
GET  /health              {"status": "healthy", "sandbox", "queue", "workers"}
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field, ValidationError, WithJsonSchema

from verl.code_server.answers import decode_tests
from verl.code_server.supervisor import QueueFull, Supervisor
from verl.code_server.walls import Limits, choose_walls
from verl.utils.serving import Door, DoorRules

MAX_SECONDS = 3600.0
REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {"description": "A web page asks, or the Host is not this machine's"},
    408: {"description": "The body did not arrive in time"},
    413: {"description": "The body has more than 64 MiB"},
    415: {"description": "The Content-Type is not application/json"},
    422: {"description": "The body has another shape, or the tests can't be decoded"},
    503: {"description": "Too many programs wait, or too many large bodies are open: see Retry-After"},
}
log = logging.getLogger("uvicorn.error")

Body = TypeVar("Body", bound=BaseModel)
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


def check_text(value: Any) -> str:  # the text may hold what UTF-8 can't encode
    if isinstance(value, str):
        return value
    raise ValueError(f"found a {type(value).__name__}, expected text")


Text = Annotated[Any, AfterValidator(check_text), WithJsonSchema({"type": "string"})]


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
    """The settings of the server.

    Attributes:
        sandbox: The walls: auto, namespaces, landlock or none.
        workers: The number of programs that run at once.
        limits: The limits of each sandbox.
        allow_packages: The packages that programs may import, in addition to Python's own.
    """

    sandbox: str = "auto"
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    limits: Limits = field(default_factory=Limits)
    allow_packages: tuple[str, ...] = ()


def create_app(settings: Settings, host: str | None = None) -> FastAPI:
    """Return the server, which builds its walls when it starts.

    NoWalls (a ValueError) ends the server there.

    Args:
        settings: The settings of the server.
        host: The address on which the server listens, if it is known (see `DoorRules`).
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A server of root gets priority over the programs, which run at 0.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, min(-5, os.getpriority(os.PRIO_PROCESS, 0)))
        walls = choose_walls(settings.sandbox, settings.limits, settings.allow_packages)
        app.state.supervisor = supervisor = Supervisor(walls, settings.workers)
        log.info("code server: %s, %d programs at once", walls.description, settings.workers)
        gc.freeze()  # so that collections skip the objects that live as long as the server
        watch = asyncio.create_task(supervisor.stock.watch(settings.limits.memory_mb << 20))
        try:
            yield
        finally:
            watch.cancel()
            supervisor.stock.close()

    app = FastAPI(title="Code server", lifespan=lifespan)
    app.add_middleware(Door, rules=DoorRules(host=host))

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        supervisor: Supervisor = app.state.supervisor
        sizes = {"queue": supervisor.queue, "workers": supervisor.workers}
        return {"status": "healthy", "sandbox": supervisor.walls.tier, **sizes}

    @app.post("/test_program", responses=REFUSALS, openapi_extra=body_of(TestRequest))
    async def test_program(request: Request) -> JSONResponse:
        return await test(await parse(request, TestRequest), stdio=False)

    @app.post("/test_program_stdio", responses=REFUSALS, openapi_extra=body_of(TestRequest))
    async def test_program_stdio(request: Request) -> JSONResponse:
        return await test(await parse(request, TestRequest), stdio=True)

    async def test(request: TestRequest, stdio: bool) -> JSONResponse:
        supervisor: Supervisor = app.state.supervisor
        try:
            large = isinstance(request.tests, str) and len(request.tests) > 1 << 16
            decoded = asyncio.to_thread(decode_tests, request.tests) if large else None
            tests = await decoded if decoded else decode_tests(request.tests)
        except ValueError as error:
            raise HTTPException(422, str(error).encode(errors="replace").decode()) from None
        report = await supervisor.test(request.program, tests, request.max_execution_time, stdio)
        reply: dict[str, Any] = {
            "results": [int(outcome == "passed") for outcome in report.outcomes],
            "runtimes": report.runtimes,
        }
        if request.detail:
            reply |= {"outcomes": report.outcomes, "judged": report.judged, "sandbox": supervisor.walls.tier}
            reply["seconds"] = report.seconds
        return JSONResponse(reply)

    @app.post("/run", responses=REFUSALS, openapi_extra=body_of(RunRequest))
    async def run(request: Request) -> JSONResponse:
        supervisor: Supervisor = app.state.supervisor
        body = await parse(request, RunRequest)
        run = await supervisor.run(body.program, body.stdin, body.max_execution_time)
        return JSONResponse(dict(zip(("stdout", "outcome", "runtime"), run, strict=True)))

    @app.exception_handler(QueueFull)
    async def refuse(request: Request, error: Exception) -> JSONResponse:
        detail = {"detail": "Too many programs wait; ask again."}
        return JSONResponse(detail, 503, {"Retry-After": "1"})

    return app


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def parse(request: Request, model: type[Body]) -> Body:
    """Read and check the body of a request.

    FastAPI would do this at three times the cost. Raises HTTPException 422 if the body does not have the
    model's shape.
    """
    message = await request.receive()  # `Door` sends the whole body at once
    try:
        return model.model_validate(json.loads(message.get("body", b"")))
    except ValidationError as error:  # The values of the request are left out, as they may not fit into JSON.
        problems = [
            {"loc": ("body", *problem["loc"]), "msg": problem["msg"], "type": problem["type"]}
            for problem in error.errors()
        ]
        raise HTTPException(422, problems) from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(
            422, f"the body can't be read as JSON: {error}".encode(errors="replace").decode()
        ) from None


app = create_app(Settings())
