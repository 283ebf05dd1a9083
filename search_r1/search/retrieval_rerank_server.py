"""Search-R1's name of the server that reranks: e5, then a cross-encoder over the first --retrieval_topk.

The flags are those of `search_r1.search.server`; `--reranking_topk` is its `--topk`. It sends
documents as objects; Search-R1's sends strings, which its own training can't read.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own
    from search_r1.search.server import main

    sys.exit(main(retriever_name="e5", reranker_model="cross-encoder/ms-marco-MiniLM-L12-v2"))
