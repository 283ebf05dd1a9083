"""What tests of several folders share: a corpus of a few documents."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from search_r1.search.corpus import Corpus


def corpus_of_documents(documents: list[dict[str, Any]]) -> Corpus:
    """Written and opened; the file's name is gone at once, as nothing needs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.jsonl")
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
        return Corpus.open(path)
