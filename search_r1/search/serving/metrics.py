"""The server's counters for Prometheus. The request path writes to `Metrics`, and GET /metrics reads it.

With several worker processes the numbers live in files of the folder that PROMETHEUS_MULTIPROC_DIR names. The
parent sets it before a worker starts. Whichever worker is asked answers with the sum over all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.process_collector import ProcessCollector

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

disable_created_metrics()  # they would be a second line for each counter, which nobody reads


class Metrics:
    """The numbers of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "search_r1", "registry": self._registry}
        counter: Callable[..., Counter] = partial(Counter, **common)
        histogram: Callable[..., Histogram] = partial(Histogram, **common)
        gauge: Callable[..., Gauge] = partial(Gauge, multiprocess_mode="livesum", **common)
        self._requests = counter("requests", "Requests to /retrieve by status of the reply", ["status"])
        help_text = "From a request's arrival to its reply"
        self._request_seconds = histogram("request_seconds", help_text, buckets=REQUEST_SECONDS)
        self.queries = counter("queries", "Queries asked for")
        self.cache_hits = counter("cache_hits", "Queries answered from the cache")
        self.searched = counter("searched_queries", "Distinct queries given to the backend")
        self.refused = counter("refused_queries", "Queries refused because the queue was full")
        self.batch_size = histogram("batch_size", "Queries in one call of the backend", buckets=BATCH_SIZES)
        self.batch_seconds = histogram("batch_seconds", "Time of one call", buckets=BATCH_SECONDS)
        help_text = "From the arrival of a batch's first query to its call"
        self.queue_seconds = histogram("queue_seconds", help_text, buckets=BATCH_SECONDS)
        self.queue_queries = gauge("queue_queries", "Queries waiting or searched right now")
        self.open_requests = gauge("open_requests", "Requests that wait for the backend")
        self.cache_entries = gauge("cache_entries", "Answers in the cache")
        self.cache_bytes = gauge("cache_bytes", "Bytes of the answers in the cache, about")
        self.ready_workers = gauge("ready_workers", "Processes that have loaded the backend")
        self.documents = gauge("documents", "Documents that are searched", multiprocess_mode="max")
        if FOLDER_VARIABLE not in os.environ:
            ProcessCollector(registry=self._registry)

    def observe_request(self, status: int, seconds: float) -> None:
        """Count one reply of /retrieve."""
        self._requests.labels(status).inc()
        self._request_seconds.observe(seconds)

    def write(self) -> bytes:
        """Return the text that Prometheus reads. It takes some milliseconds."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return generate_latest(self._registry)
        for file in Path(folder).glob("gauge_live*_*.db"):  # only the counters of a dead worker stay
            process_id = file.stem.rsplit("_", 1)[1]
            if not Path("/proc", process_id).exists():
                mark_process_dead(int(process_id), folder)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
