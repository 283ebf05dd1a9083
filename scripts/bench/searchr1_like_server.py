"""The server that scripts/bench_retrieval.py compares with: it works as Search-R1's retrieval server does.

    POST /retrieve -> FastAPI, a `def` handler in the thread pool
        -> Pyserini's LuceneSearcher.search for each query in turn -> rows of a datasets table

It was written for the comparison and has no code of Search-R1. It runs with its own Python and imports
nothing of this repository, only what a user of Search-R1 installs: Pyserini, datasets, FastAPI and plain
uvicorn.
"""

from __future__ import annotations

import argparse
from typing import Any

import datasets
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from pyserini.search.lucene import LuceneSearcher


class LuceneRequest(BaseModel):
    """The JSON of a request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description="A retrieval server that works as Search-R1's does")
    parser.add_argument("--index", required=True, help="Lucene's folder")
    parser.add_argument("--corpus", required=True, help="jsonl file; ids are the numbers of the rows")
    parser.add_argument("--cache", required=True, help="folder for the Arrow copy of the corpus")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    corpus = datasets.load_dataset("json", data_files=options.corpus, split="train", cache_dir=options.cache)
    searcher = LuceneSearcher(options.index)
    app = FastAPI()

    @app.post("/retrieve", response_model=None)  # the same as without a declared return type
    def retrieve(request: LuceneRequest) -> Any:
        result = []
        for query in request.queries:  # one Lucene search after the other
            hits = searcher.search(query, request.topk)
            result.append([{"document": corpus[int(hit.docid)], "score": hit.score} for hit in hits])
        return {"result": result}

    uvicorn.run(app, host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
