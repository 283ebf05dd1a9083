"""Search-R1's nq_rag.py: NQ with the passages of a retrieval cache in the prompt."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_prep.qa_search import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("nq_rag"))
