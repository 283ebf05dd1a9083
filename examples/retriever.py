"""A search engine of your own: any server that answers `POST /retrieve` as Search-R1's servers do.

python examples/retriever.py 8000 &
RETRIEVER_URL=http://127.0.0.1:8000/retrieve bash train_grpo.sh
"""

import re
import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

# The first line of a passage is its title.
PASSAGES = ['"Rome"\nRome is the capital of Italy.', '"Oslo"\nOslo is the capital of Norway.']
app = FastAPI()


class SearchRequest(BaseModel):
    queries: list[str]
    topk: int = 3
    return_scores: bool = True


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@app.post("/retrieve")
def retrieve(request: SearchRequest) -> dict[str, list[list[dict]]]:
    """Return the documents of each query, those that share the most words with it first."""
    result = []
    for query in request.queries:
        best = sorted(PASSAGES, key=lambda text: -len(words(query) & words(text)))[: request.topk]
        result.append([{"document": {"contents": text}, "score": 1.0} for text in best])
    return {"result": result}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
