"""Search-R1's qa_search_train_merge.py: several training sets in one train.parquet."""

from script_start import start

start(__file__)
