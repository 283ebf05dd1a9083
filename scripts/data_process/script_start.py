"""Starts `data_prep.qa_search` as Search-R1's script whose file imports this, from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def start(script: str) -> None:
    from data_prep.qa_search import main

    sys.exit(main(Path(script).stem))
