"""Data preparation: the microworld, SQuAD-format files, the tiny base model.

raw material -> corpus.jsonl and parquet rows
"""

import verl  # noqa: F401  (it says which Python has a missing package)
