"""Requests to other people's servers, repeated while they may still be answered."""

from __future__ import annotations

import asyncio
import random

import httpx

FIRST_PAUSE = 0.5  # seconds
LONGEST_PAUSE = 15.0  # seconds
PASSING = (408, 409, 425, 429)  # after these statuses, and after 5xx, a later request may be answered


class RequestFailed(ValueError):
    """A request that the server will not answer; the message is what the server said.

    Attributes:
        status: the status of the server's answer, None without an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def post_patiently(client: httpx.AsyncClient, url: str, content: str, seconds: float) -> httpx.Response:
    """Post until the server answers with status 200, and return the answer.

    After a problem that may pass (no connection, no answer within the client's timeout, a status in PASSING
    or 5xx) it asks again, after pauses that double, or that are as long as `Retry-After` says.

    Raises:
        RequestFailed: the server answered with any other status, or there was no answer within `seconds`.
    """
    problem = ""
    pause = FIRST_PAUSE
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    reply = await client.post(url, content=content)
                except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
                    raise RequestFailed(f"{type(error).__name__}: {error}") from error
                except httpx.HTTPError as error:
                    problem = f"{type(error).__name__}: {error}"
                else:
                    if reply.status_code == 200:
                        return reply
                    problem = f"status {reply.status_code}: {reply.text:.200}"
                    if reply.status_code not in PASSING and reply.status_code < 500:
                        raise RequestFailed(problem, reply.status_code)
                    wait = reply.headers.get("retry-after", "")
                    pause = max(pause, float(wait)) if wait.isdigit() else pause
                await asyncio.sleep(pause * random.uniform(1.0, 1.3))
                pause = min(2 * pause, LONGEST_PAUSE)
    except TimeoutError:
        raise RequestFailed(f"no answer within {seconds:.3g} seconds {problem}".strip()) from None
