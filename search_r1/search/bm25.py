"""BM25 in memory: Lucene's scoring (k1 0.9, b 0.4) and Lucene's English analysis, by bm25s and PyStemmer.

    documents -> analyze -> bm25s index (optionally kept in a folder) -> batch_search(queries, topk)

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009); the idf is
Lucene's log(1 + (N - n + 0.5) / (n + 0.5)). Equal scores are ordered by the document's place in the corpus,
so that the same query always gets the same answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import bm25s
import numpy as np
import Stemmer

from search_r1.search.corpus import Document

K1, B = 0.9, 0.4
ANALYSIS_VERSION = 1  # part of the fingerprint of a kept index: raise it when `analyze` changes
FINGERPRINT_FILE = "fingerprint.json"

# Runs of letters and digits; a dot or an apostrophe between two of them belongs to the word: U.S, o'brien.
WORD = re.compile(r"[^\W_]+(?:[.'’][^\W_]+)*")
STOP_WORD_TEXT = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(STOP_WORD_TEXT.split())


class Analyzer:
    """Text to index terms: words, lower case, without possessive 's and stop words, Porter-stemmed.

    Holds a stemmer, which is not safe to share: one thread at a time.
    """

    def __init__(self) -> None:
        self._stemmer = Stemmer.Stemmer("porter")

    def __call__(self, text: str) -> list[str]:
        words = (word.replace("’", "'").removesuffix("'s") for word in WORD.findall(text.lower()))
        return self._stemmer.stemWords([word for word in words if word not in STOP_WORDS])


def fingerprint(documents: list[Document]) -> dict[str, object]:
    """What a kept index must agree with: the texts (SHA-256 of all `contents`) and how they were indexed."""
    digest = hashlib.sha256()
    for document in documents:
        contents = str(document["contents"]).encode("utf-8", "surrogatepass")
        digest.update(len(contents).to_bytes(8, "little") + contents)
    return {
        "num_documents": len(documents),
        "sha256": digest.hexdigest(),
        "k1": K1,
        "b": B,
        "analysis": ANALYSIS_VERSION,
    }


class BM25Retriever:
    """Finds documents by BM25. Memory: the documents, and 8 bytes per (term, document) pair."""

    name = "bm25"

    def __init__(self, documents: list[Document], index_path: str | Path | None = None) -> None:
        """Builds the index, or reads it from the folder `index_path` if it was kept there for this corpus.

        Raises ValueError when `index_path` is something else than a folder of this class.
        """
        self.documents = documents
        self._analyze = Analyzer()
        if index_path is None:
            self._index = self._build()
            return
        folder, expected = Path(index_path), fingerprint(documents)
        if _kept_fingerprint(folder) == expected:
            self._index = bm25s.BM25.load(folder, show_progress=False)
        else:
            self._index = self._build()
            _keep(self._index, folder, expected)

    def _build(self) -> bm25s.BM25:
        vocabulary: dict[str, int] = {}
        token_ids = []
        for document in self.documents:
            terms = self._analyze(str(document["contents"]))
            token_ids.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
        if not vocabulary:
            raise ValueError("the corpus has no words to index (only stop words and punctuation)")
        index = bm25s.BM25(method="lucene", k1=K1, b=B)
        index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
        return index

    def batch_search(self, queries: list[str], topk: int) -> tuple[list[list[Document]], list[list[float]]]:
        """For each query at most `topk` documents that share a term with it, best first, and their scores."""
        rows = [self._search(query, topk) for query in queries]
        documents = [[self.documents[number] for number in numbers] for numbers, _ in rows]
        return documents, [scores.tolist() for _, scores in rows]

    def _search(self, query: str, topk: int) -> tuple[np.ndarray, np.ndarray]:
        vocabulary = self._index.vocab_dict
        term_ids = [vocabulary[term] for term in self._analyze(query) if term in vocabulary]
        if not term_ids:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        scores = self._index.get_scores_from_ids(term_ids)
        candidates = np.flatnonzero(scores)
        if len(candidates) > topk:
            # All that tie with the last place stay candidates; the stable sort then picks by number.
            threshold = np.partition(scores, -topk)[-topk]
            candidates = np.flatnonzero(scores >= threshold)
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return best, scores[best]


def _kept_fingerprint(folder: Path) -> dict[str, object] | None:
    """The fingerprint of the index in `folder`, None for a folder that is absent or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return json.loads((folder / FINGERPRINT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"--index_path: {folder} is not a BM25 index of this server (it can't read Lucene's or FAISS's). "
            "Give a new folder and the index is built there, or leave --index_path out to index in memory"
        ) from None


def _keep(index: bm25s.BM25, folder: Path, expected: dict[str, object]) -> None:
    """Writes the index beside `folder` and renames it, so that a half-written index is never read."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    index.save(aside, show_progress=False)
    (aside / FINGERPRINT_FILE).write_text(json.dumps(expected, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
