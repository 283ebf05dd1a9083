"""The code server runs nothing for a web page."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from verl.code_server.app import Settings, create_app

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
