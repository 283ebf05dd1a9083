"""A search server for controls: it answers every query with passages of another question, or with none.

    python scripts/other_passages.py http://127.0.0.1:8000/retrieve questions.parquet
    python scripts/other_passages.py none

    query -> a question of the file, always the same one for a query -> what the real server finds for that

What comes back looks as it always does, but says nothing about what was asked. The questions should be about
other passages than those that are asked: the training set's, say.
"""

from __future__ import annotations

import socket
import sys
import zlib
from collections.abc import Awaitable, Callable

import httpx
import pandas as pd
import uvicorn
from fastapi import FastAPI, Request


def passing_on(url: str, change: Callable[[list[str]], Awaitable[list[str]]]) -> FastAPI:
    """A server that asks the one at `url` for what `change` makes of queries; "none": nothing is found."""
    app, client = FastAPI(), httpx.AsyncClient(trust_env=False, timeout=60)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict:
        body = await request.json()
        if url == "none":
            return {"result": [[] for _ in body["queries"]]}
        body["queries"] = await change(body["queries"])
        return (await client.post(url, json=body)).raise_for_status().json()

    app.get("/health")(lambda: {"status": "ready"})
    return app


if __name__ == "__main__":
    questions = list(pd.read_parquet(sys.argv[2])["question"]) if len(sys.argv) > 2 else []

    async def others(queries: list[str]) -> list[str]:
        return [questions[zlib.crc32(query.encode()) % len(questions)] for query in queries]

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"retrieval server on http://127.0.0.1:{listener.getsockname()[1]}/retrieve", flush=True)
    uvicorn.Server(uvicorn.Config(passing_on(sys.argv[1], others), log_level="warning")).run([listener])
