"""Search-R1's qa_search_train_merge.py: several training sets in one train.parquet."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_prep.qa_search import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("qa_search_train_merge"))
