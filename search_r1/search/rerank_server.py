"""Serve Search-R1's reranker on its own: POST /rerank on port 6980, with Search-R1's flags and JSON.

    {"queries": [str], "documents": [[{"contents": ...} or {"document": {...}}]], "rerank_topk": int?,
     "return_scores": bool?}
        -> {"result": [[{"document": ..., "score": ...}, ...], ...]}   one list per query, best first

A document goes back as it came. (Search-R1 pairs every query with the documents of all queries, and sends
each document back as a string.)
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.logs import start_logging
from verl.utils.text import printable

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own

if TYPE_CHECKING:
    from fastapi import FastAPI

    from search_r1.search.rerank import CrossEncoder


def create_app(encoder: CrossEncoder, rerank_topk: int, host: str = "0.0.0.0") -> FastAPI:
    """Return the server over a cross-encoder.

    Args:
        encoder: The cross-encoder.
        rerank_topk: The number of documents per query when a request does not say.
        host: The address on which the server listens.
    """
    from fastapi import Body, FastAPI, HTTPException

    from verl.utils.serving import Door, DoorRules

    app = FastAPI(title="Search-R1 rerank server", docs_url=None, redoc_url=None)
    app.add_middleware(Door, rules=DoorRules(host=host))
    one_at_a_time = threading.Lock()

    @app.post("/rerank")
    def rerank(
        queries: list[str] = Body(),  # noqa: B008  # FastAPI's way to name a field of the body
        documents: list[list[dict[str, Any]]] = Body(),  # noqa: B008
        topk: int | None = Body(None, alias="rerank_topk"),  # noqa: B008
        return_scores: bool = Body(False),  # noqa: B008
    ) -> dict[str, Any]:
        if len(queries) != len(documents):
            raise HTTPException(422, f"found {len(documents)} lists of documents for {len(queries)} queries")
        rows = zip(queries, documents, strict=True)
        pairs = [(query, _text(document)) for query, row in rows for document in row]
        with one_at_a_time:
            scores = iter(encoder.score(pairs))
        result = []
        for row in documents:
            scored: list[dict[str, Any]] = [{"document": document, "score": next(scores)} for document in row]
            best = sorted(scored, key=lambda pair: -pair["score"])[: topk or rerank_topk]
            result.append(best if return_scores else [pair["document"] for pair in best])
        return {"result": result}

    def _text(document: dict[str, Any]) -> str:
        inner = document.get("document", document)
        text = inner.get("contents") if isinstance(inner, dict) else None
        if not isinstance(text, str):
            raise HTTPException(422, "a document has no 'contents' (text)")
        return text

    return app


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted.

    Returns:
        The exit status: 2 for a mistake in the flags, else 0.
    """
    from search_r1.search.backend_plan import check_at_least, check_model_folder, check_packages
    from verl.utils.hub import use_cache_if_hub_is_away

    parser = argparse.ArgumentParser(description="Rerank server")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a pair (default: 512)")
    parser.add_argument("--rerank_topk", type=int, default=3, help="documents per query (default: 3)")
    parser.add_argument("--rerank_model_name_or_path", default="cross-encoder/ms-marco-MiniLM-L12-v2")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs at once (default: 32)")
    parser.add_argument("--reranker_type", choices=["sentence_transformer"], default="sentence_transformer")
    parser.add_argument("--host", default="0.0.0.0", help="where to listen; 127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=6980)
    arguments = parser.parse_args(argv)
    try:
        check_at_least(arguments, 1, "max_length", "rerank_topk", "batch_size")
        check_packages("rerank")
        model = arguments.rerank_model_name_or_path
        check_model_folder("--rerank_model_name_or_path", model)
        use_cache_if_hub_is_away({"--rerank_model_name_or_path": model})
        from search_r1.search.rerank import CrossEncoder

        encoder = CrossEncoder(model, arguments.batch_size, arguments.max_length)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    import uvicorn

    from verl.utils.addresses import open_note
    from verl.utils.serving import SERVER_OPTIONS

    note = open_note(arguments.host, "can have documents ranked")
    if note is not None:
        print(note, file=sys.stderr, flush=True)
    app = create_app(encoder, arguments.rerank_topk, arguments.host)
    uvicorn.run(app, host=arguments.host, port=arguments.port, **SERVER_OPTIONS)
    return 0


if __name__ == "__main__":
    start_logging("reranker")
    sys.exit(main())
