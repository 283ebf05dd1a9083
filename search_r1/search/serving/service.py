"""One retrieval service: its backend, from "loading" to "ready", and the queue in front of it."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_r1.search.corpus import file_identity
from search_r1.search.launch import BatchSettings
from search_r1.search.search_backend import SearchBackend
from search_r1.search.serving.batching import Batcher
from search_r1.search.serving.metrics import Metrics

CLOSE_SECONDS = 2.0
_FOLDERS = re.compile(r"(?<!\S)[~.]{0,2}(?:[^\s/:]+/|/)+(?=[^\s/])")  # "loading data/x.index", no URL


class RetrievalService:
    """A service that loads a backend in the background and holds what all requests share."""

    def __init__(
        self,
        load: Callable[[], SearchBackend],
        corpus_path: str | None,
        backend: str,
        topk: int,
        settings: BatchSettings | None = None,
        api_key: str | None = None,
        host: str = "0.0.0.0",
    ) -> None:
        """Create a service that is not loaded yet.

        Args:
            load: Builds the backend. It runs in a thread of its own, which `start_loading` starts, and may
                say in `progress` how far it is.
            corpus_path: The corpus, or None for a backend without one.
            backend: The name of the backend until it is loaded.
            topk: Documents per query, for requests that don't say.
            settings: How queries are gathered.
            api_key: The key that clients must send. None means that there is none.
            host: The address on which the server listens.
        """
        self._load = load
        self.corpus_path = corpus_path
        self.backend = backend
        self.topk = topk
        self.settings = settings or BatchSettings()
        self.api_key = api_key
        self.host = host
        self.metrics = Metrics()
        self.retriever: SearchBackend | None = None
        self.batcher: Batcher | None = None
        self.error: BaseException | None = None
        self.progress = "starting"
        self._loaded: dict[str, Any] | None = None
        self._corpus: dict[str, Any] | None = None
        self._loader: threading.Thread | None = None

    def start_loading(self, on_end: Callable[[], None] = lambda: None) -> threading.Thread:
        """Load in the background, or keep the `error`. Then call `on_end`."""

        def work() -> None:
            try:
                retriever = self._load()
                self._loaded = retriever.describe()
                with contextlib.suppress(OSError):  # "memory" and the like
                    self._corpus = file_identity(self.corpus_path) if self.corpus_path else None
                gc.collect()
                gc.freeze()  # what was loaded stays, so the garbage collector need not look at it again
                self.backend = retriever.name
                self.batcher = Batcher(retriever, self.settings, self.metrics)
                self.metrics.ready_workers.set(1)
                self.metrics.documents.set(retriever.num_documents or 0)
                self.retriever = retriever
                self.progress = "ready"
            except BaseException as error:  # the thread's only way to tell; the main thread prints it
                self.error = error
            on_end()

        self._loader = threading.Thread(target=work, name="load", daemon=True)
        self._loader.start()
        return self._loader

    def health(self, with_paths: bool = True) -> dict[str, Any]:
        """Return what GET /health says.

        Without paths, of files and folders only their names are told.
        """
        retriever = self.retriever
        report = {
            "status": "loading" if retriever is None else "ready",
            "progress": self.progress,
            "backend": self.backend,
            "corpus_path": self.corpus_path,
            "corpus": self._corpus,
            "num_documents": None if retriever is None else retriever.num_documents,
            "loaded": self._loaded,
            "topk": self.topk,
            "api_key_needed": self.api_key is not None,
        }
        return report if with_paths else _without_folders(report)

    def close(self) -> bool:
        """End the worker and give the backend back.

        Returns:
            False if one of them is still busy. Then only the end of the process stops it.
        """
        if self._loader is not None and self._loader.is_alive():
            return False
        if self.batcher is not None and not self.batcher.close(CLOSE_SECONDS):
            return False
        if self.retriever is not None:
            self.retriever.close()
        return True


def _without_folders(value: Any) -> Any:
    """Return data in which the paths of files have lost their folders."""
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    if Path(value).is_absolute():  # its name may have spaces
        return Path(value).name
    return _FOLDERS.sub("", value)
