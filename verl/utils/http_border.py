"""The border where requests arrive and answers leave: errors in OpenAI's form, the token, limits."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as StarletteHTTPException

MAX_BODY_BYTES = 64 << 20
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


class Guard:
    """An ASGI application that checks the token, limits bodies and counts answers.

    With a token all routes except /health need it.
    """

    def __init__(self, app: Any, token: str | None, counts: Counter[tuple[str, int]]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            token: The bearer token, or None if none is needed.
            counts: The number of answers by (route, status), which this updates.
        """
        self.app = app
        self.counts = counts
        self.expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.expected is not None and scope["path"] != "/health":
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, self.expected):
                message = "expected the header Authorization: Bearer <token>"
                return await ApiError(401, "invalid_api_key", message).response()(scope, receive, send)
        num_bytes = 0

        async def limited() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.counts[getattr(scope.get("route"), "path", "other"), message["status"]] += 1
            await send(message)

        return await self.app(scope, limited, counted)


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
    return Response(orjson.dumps(value), status, headers, "application/json")


def event(value: Any) -> bytes:
    """Return a server-sent event of a stream."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
