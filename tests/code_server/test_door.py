"""The code server runs nothing for a web page."""

from __future__ import annotations

import asyncio
import socket
import sys

import httpx
import pytest
from code_server_process import running

from verl.code_server.app import Settings, create_app
from verl.utils.serving import MAX_HEAD_BYTES

BODY = b'{"program": "x = 1", "tests": ["assert x"]}'
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", ["/test_program", "/test_program_stdio", "/run"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({}, 415),
        (JSON | {"Host": "evil.example"}, 403),
        (JSON | {"Origin": "http://evil.example"}, 403),
    ],
)
def test_what_a_web_page_can_send_is_refused(path, headers, status):
    async def ask():
        transport = httpx.ASGITransport(create_app(Settings()))  # the walls are not built
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1234") as client:
            return await client.post(path, content=BODY, headers=headers)

    assert asyncio.run(ask()).status_code == status


@pytest.mark.slow
def test_uvicorns_own_command_bounds_heads_as_it_is_documented():
    protocol = ["--http", "verl.utils.serving:BoundedHeadProtocol"]
    command = [sys.executable, "-m", "uvicorn", "verl.code_server.app:app", "--port", "{port}", *protocol]
    with (
        running(command) as (client, _),
        socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert connection.recv(99).startswith(b"HTTP/1.1 431 ")
