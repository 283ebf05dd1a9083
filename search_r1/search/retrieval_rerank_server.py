"""Serve e5 under Search-R1's name, and rerank: a cross-encoder reads the first --retrieval_topk documents.

The flags are those of `search_r1.search.server`, where `--reranking_topk` is another name of `--topk`. This
server sends documents as objects. Search-R1's sends strings, which its own training can't read.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own
    from search_r1.search.server import main

    sys.exit(main(retriever_name="e5", reranker_model="cross-encoder/ms-marco-MiniLM-L12-v2"))
