"""Answers of servers with OpenAI's API: errors in its form, counts of answers, clients that go away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as StarletteHTTPException

from verl.utils.text import encodable_json

STREAM_END = b"data: [DONE]\n\n"
T = TypeVar("T")


class ApiError(Exception):
    """An error that is answered in OpenAI's form."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        self.message = message

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Return the answer to a request that raised this error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, StarletteHTTPException):
            return cls(error.status_code, "invalid_request", str(error.detail))
        if isinstance(error, RequestValidationError):
            problems = [
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]
            ]
            return cls(400, "invalid_request", "; ".join(problems))
        if isinstance(error, ValueError):
            return cls(400, "invalid_request", str(error))
        return cls(500, "server_error", "the server has met an error of its own; its log says which")

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": None}}

    def response(self) -> Response:
        headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return as_json(self.body, self.status, headers)


def answer_errors(app: Starlette) -> None:
    """Let the app answer everything that handlers raise in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    for kind in (ApiError, StarletteHTTPException, RequestValidationError, ValueError, Exception):
        app.add_exception_handler(kind, answer)


def openai_refusal(status: int, detail: str) -> dict[str, Any]:
    """Return the body of a refusal of `verl.utils.serving.Door` in OpenAI's form."""
    codes = {401: "invalid_api_key", 503: "server_full"}
    return ApiError(status, codes.get(status, "invalid_request"), detail).body


class AnswerCounter:
    """An ASGI application that counts the answers of another one."""

    def __init__(self, app: Any, counts: Counter[tuple[str, int]]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            counts: The number of answers by (route, status), which this updates.
        """
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.counts[getattr(scope.get("route"), "path", "other"), message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)


async def unless_gone(request: Request, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all coroutines return.

    If one of them raises, or the client goes away, the others are cancelled.
    """
    tasks = [asyncio.ensure_future(work) for work in works]

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for task in tasks:
            task.cancel()

    watching = asyncio.ensure_future(gone())
    try:
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        if watching.done():
            raise ApiError(499, "client_gone", "nobody reads this") from None
        raise
    finally:
        for task in [watching, *tasks]:
            task.cancel()


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_dumps(value), status, headers, "application/json")


def event(value: Any) -> bytes:
    """Return a server-sent event of a stream."""
    return b"data: " + _dumps(value) + b"\n\n"


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half of a surrogate pair in a text of the client's own, which comes back
        return orjson.dumps(encodable_json(value))
