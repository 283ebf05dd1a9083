"""The door: what a request to /retrieve may ask for, and the reply's JSON.

    body -> parse_request -> RetrieveRequest        or a Refusal: status and why, as {"detail": ...}

Fields, their defaults and unknown fields are as in Search-R1's server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import orjson

from search_r1.search.launch import MAX_TOPK

MAX_QUERIES = 16_384
MAX_QUERY_CHARS = 16_384
MAX_DOCUMENTS = 200_000  # queries times topk of one request: a reply of about 150 MB
MAX_BODY_BYTES = 32 * 2**20
EXPECTED = 'expected {"queries": [string, ...], "topk": int, "return_scores": bool}, or "query": string'


class Refusal(Exception):
    """A request that isn't served. `status`: 4xx or 5xx; `retry_after`: seconds, for 503."""

    def __init__(self, status: int, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after = status, detail, retry_after


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """A checked request: 0 to MAX_QUERIES queries without lone surrogates, 1 <= topk <= MAX_TOPK."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_request(body: bytes | bytearray, default_topk: int) -> RetrieveRequest:
    """Checks the JSON of a request. Raises Refusal 400 (no JSON), 413 (too much) or 422 (another shape)."""
    fields = _decode(body)
    if not isinstance(fields, dict):
        raise Refusal(422, EXPECTED)
    queries, single = fields.get("queries"), fields.get("query")
    if queries is None:
        queries = [single]  # SkyRL's tool asks one query a request
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise Refusal(422, EXPECTED)
    if single is not None and not isinstance(single, str):
        raise Refusal(422, EXPECTED)
    if len(queries) > MAX_QUERIES:
        raise Refusal(413, f"{len(queries)} queries in one request: at most {MAX_QUERIES} are allowed")
    longest = max(map(len, [*queries, single or ""]))
    if longest > MAX_QUERY_CHARS:
        raise Refusal(413, f"a query of {longest} characters: at most {MAX_QUERY_CHARS} are allowed")
    topk = fields.get("topk")
    if topk is None:
        topk = fields.get("topk_rerank")  # a client of Search-R1's reranking server
    topk = default_topk if topk is None else topk
    if isinstance(topk, float) and topk.is_integer():  # 3.0 is an integer in JSON
        topk = int(topk)
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise Refusal(422, f"topk: found {str(topk)[:40]}, expected an integer from 1 to {MAX_TOPK}")
    if len(queries) * topk > MAX_DOCUMENTS:
        raise Refusal(
            413, f"{len(queries)} queries with topk {topk}: at most {MAX_DOCUMENTS} documents in one reply"
        )
    return_scores = fields.get("return_scores")
    if return_scores is not None and not isinstance(return_scores, bool):
        raise Refusal(422, f"return_scores: found {str(return_scores)[:40]}, expected true or false")
    return RetrieveRequest(queries, topk, bool(return_scores))


def _decode(body: bytes | bytearray) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    # Half of a surrogate pair ("\ud83d" alone) is no character, so orjson refuses it. But Python's json
    # writes it for a query that was cut in the middle of an emoji, and such a query is to be answered, not
    # refused.
    if b"\\ud" in body or b"\\uD" in body:
        try:
            return _without_surrogates(json.loads(body))
        except (ValueError, RecursionError):
            pass
    raise Refusal(400, "the body is not valid JSON (UTF-8)")


def _without_surrogates(fields: object) -> object:
    """The same with "?" for each half of a pair in the queries."""
    if isinstance(fields, dict):
        for name in ("queries", "query"):
            value = fields.get(name)
            if isinstance(value, list):
                fields[name] = [_replace_surrogates(query) for query in value]
            elif name == "query":
                fields[name] = _replace_surrogates(value)
    return fields


def _replace_surrogates(value: object) -> object:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
