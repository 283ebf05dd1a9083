"""BM25 in process, without Java: an index that is mapped into memory, scores and words as Lucene's."""

from search_r1.search.bm25.build import build_index
from search_r1.search.bm25.retriever import BM25Retriever

__all__ = ["BM25Retriever", "build_index"]
