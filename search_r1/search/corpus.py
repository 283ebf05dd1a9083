"""Reads a corpus: one JSON object a line, `{"id": "7", "contents": "\"Title\"\\ntext", ...}`.

    corpus.jsonl -> read_corpus -> list of documents, row number = document number of the index

The file is checked line by line, because a line that is dropped or shifted makes the index answer with the
wrong passage and nobody notices.
"""

from __future__ import annotations

import json
from pathlib import Path

Document = dict[str, object]
"""One corpus line: `contents` (str) is there for sure, all other fields are passed through as they are."""


def parse_line(line: str, where: str) -> Document:
    """One document from one line. Raises ValueError that starts with `where` (file and line number)."""
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ValueError(f"{where}: found a JSON {kind}, expected an object with 'contents'")
    if not isinstance(document.get("contents"), str):
        found = ", ".join(map(repr, document)) or "no fields"
        raise ValueError(
            f"{where}: expected the text as one string under 'contents', found {found}. "
            'A line looks like {"id": "7", "contents": "\\"Title\\"\\ntext"}'
        )
    return document


def read_corpus(path: str | Path) -> list[Document]:
    """All documents of a jsonl file in order; blank lines are skipped.

    Raises ValueError with file and line number for a broken line, and for a file without documents.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--corpus_path: there is no file {path}")
    documents = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
            if line.strip():
                documents.append(parse_line(line, where))
    if not documents:
        raise ValueError(f"{path}: the corpus has no documents")
    return documents
