"""Raw material -> corpus.jsonl and parquet rows: the microworld, SQuAD-format files, the tiny base model."""

import verl  # noqa: F401  (it says which Python has what is missing)
