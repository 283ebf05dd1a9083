"""Search-R1's qa_search_test_merge.py: several test sets in one test.parquet."""

from script_start import start

start(__file__)
