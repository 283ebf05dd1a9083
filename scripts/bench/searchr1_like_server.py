"""The server that scripts/bench_retrieval.py compares with: it works as Search-R1's retrieval server does.

    POST /retrieve -> FastAPI, a `def` handler in the thread pool
        -> Pyserini's LuceneSearcher.search for each query in turn -> rows of a datasets table

Written for the comparison: no code of Search-R1. It runs with its own Python and imports nothing of this
repository, only what a user of Search-R1 installs: Pyserini, datasets, FastAPI and plain uvicorn.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import datasets
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class QueryRequest(BaseModel):
    """The JSON of a request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class LuceneBackend:
    """BM25: one Lucene search after the other; a document id is the row number of the corpus."""

    def __init__(self, index: str, corpus: datasets.Dataset) -> None:
        from pyserini.search.lucene import LuceneSearcher

        self.searcher = LuceneSearcher(index)
        self.corpus = corpus

    def search(self, queries: list[str], topk: int) -> list[list[tuple[dict[str, Any], float]]]:
        result = []
        for query in queries:
            hits = self.searcher.search(query, topk)
            result.append([(self.corpus[int(hit.docid)], hit.score) for hit in hits])
        return result


def create_app(backend: LuceneBackend, default_topk: int) -> FastAPI:
    app = FastAPI()

    @app.post("/retrieve", response_model=None)  # as where no return type is declared
    def retrieve(request: QueryRequest) -> Any:
        found = backend.search(request.queries, request.topk or default_topk)
        if not request.return_scores:
            return {"result": [[document for document, _ in row] for row in found]}
        return {
            "result": [[{"document": document, "score": score} for document, score in row] for row in found]
        }

    return app


def main() -> int:
    parser = argparse.ArgumentParser(description="A retrieval server that works as Search-R1's does")
    parser.add_argument("--index", required=True, help="Lucene's folder")
    parser.add_argument("--corpus", required=True, help="jsonl file")
    parser.add_argument("--cache", help="folder for the Arrow copy of the corpus; default: that of datasets")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    corpus = datasets.load_dataset("json", data_files=options.corpus, split="train", cache_dir=options.cache)
    app = create_app(LuceneBackend(options.index, corpus), options.topk)
    uvicorn.run(app, host="127.0.0.1", port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
