"""BM25 in process, without Java: an index that is mapped into memory, scores and words as Lucene's.

corpus -> build_index -> folder -> BM25Retriever(corpus, folder).batch_search(queries, topk)

analysis, word_break (text to terms) -> build (the index, out of core)
index (Lucene's formula, the files) -> kernel (exact MaxScore) -> retriever
"""

from search_r1.search.bm25.build import build_index
from search_r1.search.bm25.retriever import BM25Retriever

__all__ = ["BM25Retriever", "build_index"]
