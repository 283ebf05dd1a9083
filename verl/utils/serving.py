"""What each server of the project checks before it answers a request.

    socket -> BoundedHeadProtocol: a head that is too late or too long ends its connection
           -> Door: Host, Origin, Content-Type, Authorization; then the body, bounded in bytes, sum and time
           -> the application, which receives the body as one message

Retrieval, inference, the code server, the monitor's page, the reranker and the endpoint of agents use it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from verl.utils.addresses import is_loopback
from verl.utils.logs import level_or

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0  # the time within which the head of a request must arrive
MAX_BODY_BYTES = 64 << 20
MAX_OPEN_BYTES = 256 << 20  # the most bytes of the bodies of all open requests of a process
BODY_SECONDS = 30.0  # the time within which a body must arrive
DRAIN_SECONDS = 1.0  # the time for the rest of a body that is refused
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
JSON_TYPE = b"application/json"
# A head that is too long has no request to which the application could answer.
HEAD_REFUSED = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)

Headers = Iterable[tuple[bytes, bytes]]
Answer = dict[str, Any]


class BoundedHeadProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class
    """A connection of uvicorn that ends if the head of its next request comes too late or is too long.

    uvicorn itself waits for ever for the rest of a head. Give this class to `uvicorn.Config(http=...)`.
    """

    head_timer: asyncio.TimerHandle | None = None
    num_head_bytes = 0

    @property
    def waits_for_head(self) -> bool:
        """Return whether no request of the connection is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits_for_head:
            self._stop_timer()
            return
        self._start_timer()
        self.num_head_bytes += len(data)
        if self.num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(HEAD_REFUSED)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_timer(self) -> None:
        self.num_head_bytes = 0
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _end(self) -> None:
        self.head_timer = None
        if self.waits_for_head:
            self.transport.close()


SERVER_OPTIONS: dict[str, Any] = {  # of `uvicorn.Config`
    "http": BoundedHeadProtocol,
    "ws": "none",
    "log_level": level_or("info"),
    "access_log": False,
    "server_header": False,
    "timeout_keep_alive": 75,
}


class TurnedAway(Exception):
    """A request that a server does not answer.

    Attributes:
        status: The HTTP status.
        detail: What was found and what is expected.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True)
class DoorRules:
    """What a server asks of requests.

    Attributes:
        key: The key that clients send, or None if everybody may ask.
        open_paths: The paths that need no key.
        host: The address on which the server listens. None means that it is not known, and then the address
            at which a connection arrived counts.
        needs_json: Whether a body must be said to be JSON. A web page can send any other type to a server on
            its reader's machine.
    """

    key: str | None = None
    open_paths: frozenset[str] = frozenset({"/health"})
    host: str | None = None
    needs_json: bool = True


def detail_answer(status: int, detail: str) -> Answer:
    """Return the JSON of a refusal in FastAPI's form."""
    return {"detail": detail}


class Door:
    """An ASGI application that refuses bad requests, and hands on the others with their whole bodies."""

    def __init__(
        self,
        app: Any,
        rules: DoorRules,
        answer: Callable[[int, str], Answer] = detail_answer,
        on_refused: Callable[[Any, int, float], None] = lambda scope, status, seconds: None,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            rules: What is asked of requests.
            answer: Returns the JSON of a refusal from its status and detail.
            on_refused: Called with the scope, the status and the seconds of a request that was refused.
        """
        self.app = app
        self.rules = rules
        self.answer = answer
        self.on_refused = on_refused
        self.open_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived = time.monotonic()
        body = bytearray()
        try:
            try:
                check_request(scope, self.rules)
                is_whole = await self._read(scope, receive, body)
            except TurnedAway as refusal:
                self.open_bytes -= len(body)
                body.clear()
                await self._refuse(refusal, scope, receive, send)
                self.on_refused(scope, refusal.status, time.monotonic() - arrived)
                return
            messages: list[dict[str, Any]] = [{"type": "http.disconnect"}]
            if is_whole:
                messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def receive_whole() -> Any:
                return messages.pop() if messages else await receive()

            await self.app(scope, receive_whole, send)
        finally:
            self.open_bytes -= len(body)

    async def _read(self, scope: Any, receive: Any, body: bytearray) -> bool:
        """Read a body, and return False if the client has gone away meanwhile.

        Raises TurnedAway if the body is too large or too slow, or if all open bodies are too large.
        """
        too_large = f"the body is too large: at most {MAX_BODY_BYTES} bytes"
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(not length.isdigit() or int(length) > MAX_BODY_BYTES for length in lengths):
            raise TurnedAway(413, too_large)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    chunk = message.get("body", b"")
                    body += chunk
                    self.open_bytes += len(chunk)
                    if len(body) > MAX_BODY_BYTES:
                        raise TurnedAway(413, too_large)
                    if self.open_bytes > MAX_OPEN_BYTES:
                        raise TurnedAway(503, "too many large requests at once; ask again")
                    if not message.get("more_body"):
                        return True
        except TimeoutError:
            raise TurnedAway(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None

    async def _refuse(self, refusal: TurnedAway, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", JSON_TYPE)]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status == 503:
            headers.append((b"retry-after", b"1"))
        expects = any(name == b"expect" for name, _ in scope["headers"])
        if expects or refusal.status == 408 or not await _drained(receive):
            headers.append((b"connection", b"close"))
        content = json.dumps(self.answer(refusal.status, refusal.detail)).encode()
        headers.append((b"content-length", b"%d" % len(content)))
        with suppress(RuntimeError):  # from uvloop, for a connection that was just reset
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": content})


async def _drained(receive: Any) -> bool:
    """Read the rest of a body for a moment, and return whether it has ended.

    A connection that is closed before its client has sent everything may lose the answer.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while (message := await receive())["type"] != "http.disconnect":
                if not message.get("more_body"):
                    return True
    return False


def check_request(scope: Any, rules: DoorRules) -> None:
    """Raise TurnedAway if the head of a request breaks the rules.

    Where no key is needed, the request must not come from a web page of somebody else. Such a page either
    has another Origin, or its own host name was pointed at this machine.
    """
    headers = scope["headers"]
    if rules.key is not None:
        if scope["path"] not in rules.open_paths and not key_matches(headers, rules.key):
            raise TurnedAway(
                401,
                "a valid api key is needed, once: expected the header Authorization: Bearer <token>, or "
                "X-API-Key: <token>",
            )
    else:
        _check_host_and_origin(scope, rules)
    if rules.needs_json and scope["method"] not in SAFE_METHODS and _has_body(headers):
        types = [value for name, value in headers if name == b"content-type"]
        if len(types) != 1 or types[0].split(b";")[0].strip().lower() != JSON_TYPE:
            found = ", ".join(_shown(value) for value in types) or "none"
            raise TurnedAway(415, f"Content-Type: found {found}; expected application/json")


def _check_host_and_origin(scope: Any, rules: DoorRules) -> None:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1:
        raise TurnedAway(400, "found several Host headers; expected one")
    address = rules.host
    if address is None and scope.get("server"):
        address = scope["server"][0]
    if address is not None and is_loopback(address) and hosts and not is_own_name(_text(hosts[0])):
        raise TurnedAway(
            403,
            f"Host: found {_shown(hosts[0])}; this server listens on {address} and expects localhost or an "
            "IP address. Let a proxy send Host: localhost",
        )
    origins = [value for name, value in scope["headers"] if name == b"origin"]
    if scope["method"] not in SAFE_METHODS and origins:
        own_origins = [
            b"%s://%s" % (scheme, host.lower()) for scheme in (b"http", b"https") for host in hosts
        ]
        if len(origins) > 1 or origins[0].lower() not in own_origins:
            raise TurnedAway(403, f"Origin: found {_shown(origins[0])}; web pages of others may not ask")


def _has_body(headers: Headers) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0"))
        for name, value in headers
    )


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip()


def _shown(value: bytes) -> str:
    return ascii(_text(value)[:80])


def is_own_name(host: str) -> bool:
    """Return whether nobody else can point the name in a Host header at this machine."""
    name = host.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name == _machine_name()


@cache
def _machine_name() -> str:
    return socket.gethostname().lower()


def key_matches(headers: Headers, key: str) -> bool:
    """Return whether `Authorization: Bearer KEY` or `X-API-Key: KEY` is there, and neither of them twice.

    It takes the same time for every key.
    """
    expected = key.encode(errors="surrogateescape")  # as the environment has it
    authorizations = [value for name, value in headers if name == b"authorization"]
    api_keys = [value for name, value in headers if name == b"x-api-key"]
    if len(authorizations) > 1 or len(api_keys) > 1:
        return False
    matches = False
    for value in authorizations:
        scheme, _, token = value.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            matches |= hmac.compare_digest(token.strip(), expected)
    for value in api_keys:
        matches |= hmac.compare_digest(value.strip(), expected)
    return matches
