"""Serve retrieval under Search-R1's name: `python search_r1/search/retrieval_server.py --index_path ...`.

The flags are those of `search_r1.search.server`. As in Search-R1, the encoder is e5 if no other is named.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own
    from search_r1.search.server import main

    sys.exit(main(retriever_name="e5"))
