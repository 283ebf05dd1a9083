"""The server's routes: POST /retrieve on its own (see retrieve_endpoint.py), all the rest in FastAPI.

    POST /retrieve      Search-R1's protocol            GET /metrics        Prometheus
    GET  /health        loading or ready, and of what   GET /openapi.json   this list, with schemas
    GET  /              a search page for people        GET /docs           the same for people

With an api key, /retrieve and /metrics ask for it, and /health tells the paths of files to whoever has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from search_r1.search.launch import MAX_TOPK
from search_r1.search.serving.retrieve_endpoint import (
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    RetrieveEndpoint,
)
from search_r1.search.serving.service import RetrievalService
from verl.utils.serving import Door, DoorRules, key_matches

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json"})
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"

REFUSALS = {
    400: "The body is not JSON",
    401: "The server asks for an api key, and it is missing or wrong",
    403: "A web page of somebody else asks",
    408: "The body did not arrive in time",
    413: "Too many queries, too long a query, too many documents or too large a body",
    422: "The JSON has another shape, or topk is out of range",
    500: "The backend failed on one of the queries",
    503: "Still loading, the queue is full, or the engine behind the server does not answer: see Retry-After",
    504: "No answer within the server's --request_timeout_s",
}


class RetrieveFields(BaseModel):
    """A request with queries, or with a single query. Other fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["queries"], "properties": {"queries": {"type": "array"}}},
                {"required": ["query"], "properties": {"query": {"type": "string"}}},
            ],
            "example": {"queries": ["Who wrote Faust?"], "topk": 3, "return_scores": True},
        }
    )
    queries: Annotated[list[Query] | None, Field(max_length=MAX_QUERIES)] = None
    query: Query | None = None
    topk: Annotated[int | None, Field(ge=1, le=MAX_TOPK, description="default: the server's --topk")] = None
    return_scores: bool | None = False


class DocumentFields(BaseModel):
    """A line of the corpus with all its fields."""

    model_config = ConfigDict(extra="allow")
    contents: str = Field(description='"Title" line, then the text')


class Hit(BaseModel):
    """A document with its score. Higher is better. Null stands for what is not a number."""

    document: DocumentFields
    score: float | None


class RetrieveReply(BaseModel):
    """One list per query, best first: hits with return_scores, else plain documents."""

    result: list[list[Hit]] | list[list[DocumentFields]]


class ErrorReply(BaseModel):
    """The reason for a refusal."""

    detail: str


def create_app(service: RetrievalService) -> ASGIApp:
    """Return the application with all routes over a service."""
    retrieve_endpoint = RetrieveEndpoint(service)
    rest = FastAPI(title="Search-R1 retrieval server", redoc_url=None)
    page = Path(__file__).with_name("page.html").read_bytes()
    refusals: dict[int | str, dict[str, Any]] = {}
    for status, meaning in REFUSALS.items():
        refusals[status] = {"model": ErrorReply, "description": meaning}

    @rest.get("/", include_in_schema=False)
    async def search_page() -> Response:
        return Response(page, media_type="text/html", headers=PAGE_HEADERS)

    @rest.get("/health", summary="Loading or ready, and what is loaded")
    async def health(request: Request) -> dict[str, Any]:
        key = service.api_key
        return service.health(with_paths=key is not None and key_matches(request.headers.raw, key))

    @rest.get(
        "/metrics", summary="Counters", response_class=PlainTextResponse, responses={401: refusals[401]}
    )
    def metrics() -> Response:
        return Response(service.metrics.write(), media_type=METRICS_TYPE)

    @rest.post("/retrieve", summary="Search", responses=refusals)
    async def retrieve(fields: RetrieveFields) -> RetrieveReply:
        raise AssertionError("the endpoint below answers this route; here it is only described")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_search = scope["type"] == "http" and scope["path"] == "/retrieve"
        await (retrieve_endpoint if is_search else rest)(scope, receive, send)

    def count_refusal(scope: Scope, status: int, seconds: float) -> None:
        if scope["path"] == "/retrieve":
            service.metrics.observe_request(status, seconds)

    # A search only reads, and many clients of Search-R1's protocol say no Content-Type.
    rules = DoorRules(service.api_key, OPEN_PATHS, service.host, needs_json=False)
    return Door(app, rules, on_refused=count_refusal)
