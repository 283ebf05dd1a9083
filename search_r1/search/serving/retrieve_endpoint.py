"""POST /retrieve as a bare ASGI callable: no framework stands between the socket and the queue.

    Door (api key, bounds of the body) -> parse_request -> Batcher.submit -> QueryAnswer -> the reply's JSON

Fields, their defaults and unknown fields are as in Search-R1's server. The documents' JSON goes into the
reply as it is in the corpus. Every refusal is {"detail": reason}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from functools import partial

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from search_r1.search.launch import MAX_TOPK
from search_r1.search.serving.batching import Batcher, Refusal, Ticket
from search_r1.search.serving.service import RetrievalService

MAX_QUERIES = 16_384
MAX_QUERY_CHARS = 16_384
MAX_DOCUMENTS = 200_000  # queries times topk of one request: a reply of about 150 MB
EXPECTED = 'expected {"queries": [string, ...], "topk": int, "return_scores": bool}, or "query": string'
LOADING_RETRY_SECONDS = 2
STOPPING_RETRY_SECONDS = 1


def parse_request(body: bytes | bytearray, default_topk: int) -> tuple[list[str], int, bool]:
    """Return a request's queries, topk and return_scores.

    There are 0 to MAX_QUERIES queries, without lone surrogates. topk is 1 to MAX_TOPK.

    Raises:
        Refusal: 400 (no JSON), 413 (too much) or 422 (another shape).
    """
    fields = _decode(body)
    if not isinstance(fields, dict):
        raise Refusal(422, EXPECTED)
    queries = fields.get("queries")
    single = fields.get("query")
    if queries is None:
        queries = [single]  # SkyRL's tool asks one query a request
    if (
        not isinstance(queries, list)
        or not all(isinstance(query, str) for query in queries)
        or not isinstance(single, str | None)
    ):
        raise Refusal(422, EXPECTED)
    if len(queries) > MAX_QUERIES:
        raise Refusal(413, f"{len(queries)} queries in one request: at most {MAX_QUERIES} are allowed")
    longest = max(map(len, [*queries, single or ""]))
    if longest > MAX_QUERY_CHARS:
        raise Refusal(413, f"a query of {longest} characters: at most {MAX_QUERY_CHARS} are allowed")
    # A client of Search-R1's reranking server sends `topk_rerank`.
    candidates = (fields.get("topk"), fields.get("topk_rerank"), default_topk)
    topk = next(value for value in candidates if value is not None)
    if isinstance(topk, float) and topk.is_integer():  # 3.0 is an integer in JSON
        topk = int(topk)
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise Refusal(422, f"topk: found {str(topk)[:40]}, expected an integer from 1 to {MAX_TOPK}")
    if len(queries) * topk > MAX_DOCUMENTS:
        request_size = f"{len(queries)} queries with topk {topk}"
        raise Refusal(413, f"{request_size}: at most {MAX_DOCUMENTS} documents in one reply")
    return_scores = fields.get("return_scores")
    if return_scores is not None and not isinstance(return_scores, bool):
        raise Refusal(422, f"return_scores: found {str(return_scores)[:40]}, expected true or false")
    return queries, topk, bool(return_scores)


def _decode(body: bytes | bytearray) -> object:
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(body)
    # Half of a surrogate pair ("\ud83d" alone) is no character, so orjson refuses it. But Python's json
    # writes it for a query that was cut in the middle of an emoji. Such a query is answered, with "?" for the
    # half.
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False) if b"\\u" in body else ""
        return orjson.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not valid JSON (UTF-8)") from None


class RetrieveEndpoint:
    """The endpoint that answers requests to /retrieve from one service."""

    def __init__(self, service: RetrievalService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        status = 500
        try:
            try:
                reply = await self._answer(scope, receive, arrived)
                response = Response(reply, media_type="application/json")
            except Refusal as refusal:
                response = _refused(refusal)
            except asyncio.CancelledError:  # the server stops, and this one took longer than it waits
                response = _refused(Refusal(503, "the server is stopping", STOPPING_RETRY_SECONDS))
            with contextlib.suppress(RuntimeError):  # from uvloop, for a connection that was just reset
                await response(scope, receive, send)
            status = response.status_code
        except ClientDisconnect:
            status = 499  # nobody sees it but the metrics; nginx uses this number
        finally:
            self._service.metrics.observe_request(status, time.monotonic() - arrived)

    async def _answer(self, scope: Scope, receive: Receive, arrived: float) -> bytes:
        """Return the JSON of the reply.

        Raises Refusal or ClientDisconnect.
        """
        service = self._service
        if scope["method"] != "POST":
            raise Refusal(405, "only POST is answered here")
        body = await Request(scope, receive).body()
        queries, topk, return_scores = parse_request(body, service.topk)
        batcher = service.batcher
        if batcher is None:
            loading = f"still loading {service.corpus_path or service.backend}"
            raise Refusal(503, loading, LOADING_RETRY_SECONDS)
        ticket = batcher.submit(queries, topk, arrived, partial(_watch, receive, batcher))
        await ticket.future
        lists = [hits.write(return_scores) for hits in ticket.hits if hits is not None]
        assert len(lists) == len(queries), "a ticket ended without all its hits"
        return b'{"result":[%b]}' % b",".join(lists)


def _watch(receive: Receive, batcher: Batcher, ticket: Ticket) -> None:
    """Drop a ticket when its client closes the connection."""

    async def wait() -> None:
        if (await receive())["type"] == "http.disconnect":
            batcher.drop(ticket, ClientDisconnect())

    task = asyncio.ensure_future(wait())
    ticket.future.add_done_callback(lambda _: task.cancel())


def _refused(refusal: Refusal) -> Response:
    headers = {"allow": "POST"} if refusal.status == 405 else {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    content = orjson.dumps({"detail": refusal.detail})
    return Response(content, refusal.status, headers, media_type="application/json")
