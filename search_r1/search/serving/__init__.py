"""The HTTP server behind `search_r1.search.server`: endpoint, micro-batching, pages, metrics, processes."""
