"""Raw material -> corpus.jsonl and parquet rows: the microworld, SQuAD-format files, the tiny base model."""
