"""What every search backend is: queries in, documents and scores out.

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
    """One passage. `json`: a JSON object in UTF-8, without a line break, with `contents` (str: `"Title"`
    line, then text). `row`: its line in the corpus, from 0 without blank lines; None for a page that is in no
    corpus.

    Example: Document(b'{"id": "7", "contents": "\\\\"Rome\\\\"\\\\nRome is a city."}', row=7).contents
    """

    json: bytes
    row: int | None = None

    @classmethod
    def from_fields(cls, fields: dict[str, Any], row: int | None = None) -> Document:
        """A document from its decoded fields (ASCII JSON, so that any text survives)."""
        return cls(json.dumps(fields, separators=(",", ":")).encode("ascii"), row)

    @property
    def fields(self) -> dict[str, Any]:
        """The decoded JSON; decoded at each call."""
        return json.loads(self.json)

    @property
    def contents(self) -> str:
        """The text: first line the title in quotation marks, then the passage. Decoded at each call."""
        return self.fields["contents"]


SearchResult = tuple[list[list[Document]], list[list[float]]]
"""For each query its documents, best first, and as many scores (higher is better)."""


def best_first(scored: Iterable[list[tuple[Document, float]]], topk: int) -> SearchResult:
    """The best `topk` of each query's documents; ties are ordered by row."""

    def place(pair: tuple[Document, float]) -> tuple[float, float]:
        return -pair[1], math.inf if pair[0].row is None else pair[0].row

    rows = [sorted(row, key=place)[:topk] for row in scored]
    return [[document for document, _ in row] for row in rows], [[score for _, score in row] for row in rows]


class SearchBackend(Protocol):
    """A search backend. Its methods are called from one thread at a time.

    num_documents: None if not known (an online search engine).
    batch_search: for each query at most `topk` (>= 1) documents, best first, and their scores. The same query
        always gets the same answer, whatever else is in the batch: ties are ordered by row. Raises
        RetrievalUnavailable when an engine behind this one doesn't answer.
    describe: what is loaded, for people: JSON values only (backend, index and model, sizes).
    close: gives back files, threads and memory. May be called twice.
    """

    name: str

    @property
    def num_documents(self) -> int | None: ...
    def batch_search(self, queries: list[str], topk: int) -> SearchResult: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class RetrievalUnavailable(RuntimeError):
    """The backend can't answer now (an online engine is down or over its limit). The server says 503."""
