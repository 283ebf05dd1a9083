"""BM25 written down slowly, from Lucene's formula: what the index must answer, to the last bit."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from corpus_parts import corpus_of_documents

from search_r1.search.bm25.analysis import analyze
from search_r1.search.corpus import Corpus

FLOAT = np.float32


def corpus_of(texts: list[str]) -> Corpus:
    return corpus_of_documents([{"id": str(i), "contents": text} for i, text in enumerate(texts)])


def kept_length(length: int) -> int:
    """Lucene's lossy length: exact below 40, then the four highest bits of what is above 24."""
    if length < 24:
        return length
    rest = length - 24
    lost = max(0, rest.bit_length() - 4)
    return 24 + ((rest >> lost) << lost)


class Reference:
    """Looks at every document."""

    def __init__(self, texts: list[str]) -> None:
        self.documents = [Counter(analyze(text)) for text in texts]
        self.filled = sum(1 for document in self.documents if document)
        average = FLOAT(sum(document.total() for document in self.documents) / self.filled)
        lengths = [FLOAT(kept_length(document.total())) for document in self.documents]
        self.inverse_norms = [
            FLOAT(1) / (FLOAT(0.9) * ((FLOAT(1) - FLOAT(0.4)) + FLOAT(0.4) * length / average))
            for length in lengths
        ]

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """(row, score) of the best documents, best first."""
        weights = {}
        for term, count in Counter(analyze(query)).items():
            holding = sum(1 for document in self.documents if term in document)
            idf = math.log(1 + (self.filled - holding + 0.5) / (holding + 0.5))
            weights[term] = FLOAT(count) * FLOAT(idf)
        found = []
        for row, document in enumerate(self.documents):
            scores = [
                float(weight - weight / (FLOAT(1) + FLOAT(document[term]) * self.inverse_norms[row]))
                for term, weight in weights.items()
                if term in document
            ]
            if scores:
                found.append((row, float(FLOAT(sum(scores)))))
        return sorted(found, key=lambda entry: (-entry[1], entry[0]))[:topk]
