"""The making of an index: the check of its corpus, and one job that survives a kill."""
