"""The interface of every search backend: queries in, documents and scores out.

    [query, ...] -> SearchBackend.batch_search(queries, topk) -> [[Document, ...], ...], [[score, ...], ...]

A document travels as the JSON text of its corpus line, so all its fields reach the client as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Document:
    """One passage.

    Attributes:
        json: A JSON object in UTF-8, without a line break. Its field `contents` is a string: a line with the
            `"Title"`, then the text.
        row: The document's line in the corpus, from 0, not counting blank lines. It is None for a page that
            is in no corpus.

    Example: Document(b'{"id": "7", "contents": "\\\\"Rome\\\\"\\\\nRome is a city."}', row=7).contents
    """

    json: bytes
    row: int | None = None

    @classmethod
    def from_fields(cls, fields: dict[str, Any], row: int | None = None) -> Document:
        """Return a document from its decoded fields. It is ASCII JSON, so that any text survives."""
        return cls(json.dumps(fields, separators=(",", ":")).encode("ascii"), row)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the decoded JSON. It is decoded at each call."""
        return json.loads(self.json)

    @property
    def contents(self) -> str:
        """Return the text: a line with the title in quotation marks, then the passage.

        It is decoded at each call.
        """
        return self.fields["contents"]


SearchResult = tuple[list[list[Document]], list[list[float]]]
"""For each query its documents, best first, and as many scores (higher is better)."""


def best_first(scored: Iterable[list[tuple[Document, float]]], topk: int) -> SearchResult:
    """Return the best `topk` of each query's documents, with ties ordered by row."""

    def sort_key(pair: tuple[Document, float]) -> tuple[float, float]:
        return -pair[1], math.inf if pair[0].row is None else pair[0].row

    rows = [sorted(row, key=sort_key)[:topk] for row in scored]
    return [[document for document, _ in row] for row in rows], [[score for _, score in row] for row in rows]


class SearchBackend(Protocol):
    """A search backend. Its methods are called from one thread at a time.

    - `num_documents` is None if it is not known, as for an online search engine.
    - `batch_search` returns for each query at most `topk` (>= 1) documents, best first, and their scores. The
      same query always gets the same answer, whatever else is in the batch. Ties are ordered by row. It
      raises RetrievalUnavailable if an engine behind this backend doesn't answer.
    - `describe` says what is loaded, for people. It returns JSON values only (backend, index and model,
      sizes).
    - `close` gives back files, threads and memory. It may be called twice.
    """

    name: str

    @property
    def num_documents(self) -> int | None: ...
    def batch_search(self, queries: list[str], topk: int) -> SearchResult: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class RetrievalUnavailable(RuntimeError):
    """The error of a backend that can't answer now, because an online engine is down or over its limit.

    The server answers it with 503.
    """
