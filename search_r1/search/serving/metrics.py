"""What the server counts, for Prometheus: the request path writes to `Metrics`, GET /metrics reads it.

With several worker processes the numbers live in files of the folder that PROMETHEUS_MULTIPROC_DIR names
(set by the parent before a worker starts), and whichever worker is asked answers with the sum over all.
"""

from __future__ import annotations

import os
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

disable_created_metrics()  # a second line for each counter that nobody reads


class Metrics:
    """The numbers of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "search_r1", "registry": self._registry}
        self._requests = Counter(
            "requests", "Requests to /retrieve by status of the reply", ["status"], **common
        )
        self._by_status: dict[int, Counter] = {}
        self._request_seconds = Histogram(
            "request_seconds", "From a request's arrival to its reply", buckets=REQUEST_SECONDS, **common
        )
        self.queries = Counter("queries", "Queries asked for", **common)
        self.cache_hits = Counter("cache_hits", "Queries answered from the cache", **common)
        self.searched = Counter("searched_queries", "Distinct queries given to the backend", **common)
        self.refused = Counter("refused_queries", "Queries refused because the queue was full", **common)
        self.batch_size = Histogram(
            "batch_size", "Queries in one call of the backend", buckets=BATCH_SIZES, **common
        )
        self.batch_seconds = Histogram("batch_seconds", "Time of one call", buckets=BATCH_SECONDS, **common)
        self.queue_seconds = Histogram(
            "queue_seconds",
            "From the arrival of a batch's first query to its call",
            buckets=BATCH_SECONDS,
            **common,
        )
        summed = common | {"multiprocess_mode": "livesum"}
        self.queue_queries = Gauge("queue_queries", "Queries waiting or searched right now", **summed)
        self.open_requests = Gauge("open_requests", "Requests that wait for the backend", **summed)
        self.cache_entries = Gauge("cache_entries", "Answers in the cache", **summed)
        self.cache_bytes = Gauge("cache_bytes", "Bytes of the answers in the cache, about", **summed)
        self.ready_workers = Gauge("ready_workers", "Processes that have loaded the backend", **summed)
        self.documents = Gauge("documents", "Documents that are searched", multiprocess_mode="max", **common)
        if FOLDER_VARIABLE not in os.environ:
            ProcessCollector(registry=self._registry)

    def observe_request(self, status: int, seconds: float) -> None:
        """One reply of /retrieve."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(str(status))
        counter.inc()
        self._request_seconds.observe(seconds)

    def write(self) -> bytes:
        """The text that Prometheus reads; takes some milliseconds."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return generate_latest(self._registry)
        for file in Path(folder).glob("gauge_live*_*.db"):  # of a dead worker only what it counted stays
            number = file.stem.rsplit("_", 1)[1]
            if not Path("/proc", number).exists():
                mark_process_dead(int(number), folder)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
