"""The rows that a run reads: data sets, mixtures, streams."""
