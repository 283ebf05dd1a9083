"""What the server counts, for Prometheus: the request path writes to `Metrics`, GET /metrics reads it.

With several worker processes the numbers live in files of the folder that PROMETHEUS_MULTIPROC_DIR names
(set by the parent before a worker starts), and whichever worker is asked answers with the sum over all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

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
        everywhere: dict[str, Any] = {"namespace": "search_r1", "registry": self._registry}

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, **everywhere)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, meaning, buckets=buckets, **everywhere)

        def gauge(name: str, meaning: str, over_workers: Literal["livesum", "max"] = "livesum") -> Gauge:
            return Gauge(name, meaning, multiprocess_mode=over_workers, **everywhere)

        requests = counter("requests", "Requests to /retrieve by status of the reply", "status")
        self._requests = requests
        self._by_status: dict[int, Counter] = {}
        self._seconds = histogram("request_seconds", "From a request's arrival to its reply", REQUEST_SECONDS)
        self._queries = counter("queries", "Queries asked for")
        self._cache_hits = counter("cache_hits", "Queries answered from the cache")
        self._searched = counter("searched_queries", "Distinct queries given to the backend")
        self._refused = counter("refused_queries", "Queries refused because the queue was full")
        self._batch_size = histogram("batch_size", "Queries in one call of the backend", BATCH_SIZES)
        self._batch_seconds = histogram("batch_seconds", "Time of one call", BATCH_SECONDS)
        self._queue_seconds = histogram(
            "queue_seconds", "From the arrival of a batch's first query to its call", BATCH_SECONDS
        )
        self._queue = [
            gauge("queue_queries", "Queries waiting or searched right now"),
            gauge("queue_bytes", "Bytes of their text"),
            gauge("open_requests", "Requests that wait for the backend"),
            gauge("cache_entries", "Answers in the cache"),
            gauge("cache_bytes", "Bytes of the answers in the cache, about"),
        ]
        self._ready = gauge("ready_workers", "Processes that have loaded the backend")
        self._documents = gauge("documents", "Documents that are searched", over_workers="max")
        if FOLDER_VARIABLE not in os.environ:
            ProcessCollector(registry=self._registry)

    def observe_request(self, status: int, seconds: float) -> None:
        """One reply of /retrieve."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(str(status))
        counter.inc()
        self._seconds.observe(seconds)

    def count_queries(self, num_queries: int, cached: int) -> None:
        """Queries of a request that was let in; `cached`: those that the cache answered."""
        self._queries.inc(num_queries)
        if cached:
            self._cache_hits.inc(cached)

    def count_refused(self, num_queries: int) -> None:
        self._refused.inc(num_queries)

    def observe_batch(self, size: int, seconds: float, waited: float) -> None:
        """One call of the backend; `waited`: seconds that its first query was in the server before."""
        self._searched.inc(size)
        self._batch_size.observe(size)
        self._batch_seconds.observe(seconds)
        self._queue_seconds.observe(waited)

    def show_queue(self, *values: int) -> None:
        """How full queue and cache are now: queries, their bytes, requests, cache entries, their bytes."""
        for gauge, value in zip(self._queue, values, strict=True):
            gauge.set(value)

    def show_ready(self, num_documents: int | None) -> None:
        """The backend is loaded; `num_documents` None: not known."""
        self._ready.set(1)
        self._documents.set(num_documents or 0)

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
