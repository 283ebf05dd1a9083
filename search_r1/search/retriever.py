"""What every search backend is: queries in, documents and scores out.

    [query, ...] -> SearchBackend.batch_search(queries, topk) -> [[Document, ...], ...], [[score, ...], ...]

A document travels as the JSON text of its corpus line. Nothing decodes it on its way from the corpus to the
reply, so all its fields reach the client as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Document:
    """One passage.

    `json`: a JSON object in UTF-8, without a line break, with `contents` (str: `"Title"` line, then text).
    `row`: its line in the corpus, counted from 0 without blank lines; None for a page that is in no corpus.

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


class SearchBackend(Protocol):
    """A search backend. Its methods are called from one thread at a time."""

    name: str

    @property
    def num_documents(self) -> int | None:
        """None: not known (an online search engine)."""
        ...

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """For each query at most `topk` (>= 1) documents, best first, and their scores.

        The same query always gets the same answer, whatever else is in the batch: ties are ordered by row.
        Raises RetrievalUnavailable when an engine behind this one doesn't answer.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What is loaded, for people: JSON values only (backend, index and model, sizes)."""
        ...

    def close(self) -> None:
        """Gives back files, threads and memory. May be called twice."""
        ...


class RetrievalUnavailable(RuntimeError):
    """The backend can't answer now (an online engine is down or over its limit). The server says 503."""
