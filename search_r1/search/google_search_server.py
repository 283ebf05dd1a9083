"""Serve Google's Custom Search under Search-R1's name: `--api_key KEY --cse_id ID [--snippet_only]`.

`--api_key` is Google's key here. The key that clients of this server must send is in SEARCH_R1_API_KEY.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own
    from search_r1.search.server import main

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api_key")
    google, others = parser.parse_known_args()
    if google.api_key:
        os.environ["GOOGLE_API_KEY"] = google.api_key
    sys.exit(main(others, retriever_name="google"))
