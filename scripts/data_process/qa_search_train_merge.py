"""Search-R1's qa_search_train_merge.py: several training sets in one train.parquet."""

import script_start  # noqa: F401
