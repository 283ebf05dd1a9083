"""Search-R1's qa_search_test_merge.py: several test sets in one test.parquet."""

import script_start  # noqa: F401
