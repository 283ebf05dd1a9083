"""Search-R1's nq_search.py: NQ for a policy that searches."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_prep.qa_search import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("nq_search"))
