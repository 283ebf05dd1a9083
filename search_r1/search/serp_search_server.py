"""Serve SerpAPI under Search-R1's name: `--search_url URL --serp_api_key KEY [--topk 3]`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own
    from search_r1.search.server import main

    sys.exit(main(retriever_name="serpapi"))
