"""BM25 in this process, without Java, on an index that is mapped into memory.

Scores and words are those of Lucene.
"""

from search_r1.search.bm25.bm25_retriever import BM25Retriever
from search_r1.search.bm25.build import build_index

__all__ = ["BM25Retriever", "build_index"]
