"""Dense retrieval: exact search of our own index folders, on a CPU or over all GPUs, and FAISS for its files.

    queries -> Encoder -> VectorScan (scan.py) or FaissIndex (faiss_index.py) -> rows -> documents

A row of the index is a row of the corpus. Scores are inner products.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from search_r1.search.corpus import Corpus
from search_r1.search.corpus_files import sidecar_path
from search_r1.search.dense.embeddings import open_embeddings
from search_r1.search.dense.encoder import Encoder
from search_r1.search.dense.scan import VectorScan, place_on_gpus
from search_r1.search.manifest import MappedFiles
from search_r1.search.memory import check_fits
from search_r1.search.search_backend import SearchResult

ADVICE = "Use more memory, a GPU, or a FAISS index that reads less (--faiss_type IVF4096,SQ8 or HNSW64)"


class DenseRetriever:
    """A retriever that compares vectors. It is called by one thread at a time.

    On a CPU the vectors stay in the mapped file. They are shared by all processes, and given back when memory
    is short.
    """

    def __init__(
        self,
        corpus: Corpus,
        index_path: str | Path,
        encoder: Encoder,
        num_threads: int = 1,
        report: Callable[[str], None] = lambda line: None,
        faiss_gpu: bool = False,
        faiss_nprobe: int | None = None,
    ) -> None:
        """Open an index.

        Args:
            corpus: The corpus that the index was built from.
            index_path: A folder, which is searched where the encoder runs, or a FAISS file.
            encoder: Makes the vectors of queries.
            num_threads: Threads of a search and of the encoder on a CPU.
            report: Gets lines about what happens.
            faiss_gpu: Copy a FAISS index to all GPUs in float16, a part to each.
            faiss_nprobe: How many lists of an IVF index a query looks into.

        Raises:
            ValueError: If index, corpus and encoder don't belong together, and when memory is short.
        """
        path = Path(index_path)
        on_gpu = encoder.device.type == "cuda"
        self._corpus = corpus
        self._encoder = encoder
        self.name = "exact" if path.is_dir() else "faiss"
        if self.name == "exact":
            vectors = open_embeddings(path)[1]
            num_vectors, dimension = vectors.shape
        else:
            from search_r1.search.dense.faiss_index import FaissIndex, read_mapped

            index = read_mapped(path)
            num_vectors = int(index.ntotal)
            dimension = int(index.d)
        if num_vectors != len(corpus):
            raise ValueError(
                f"--index_path: {path} holds {num_vectors:,} vectors, the corpus {len(corpus):,} passages: "
                "give the corpus that the index was built from"
            )
        if encoder.dimension != dimension:
            raise ValueError(
                f"--retriever_model: {encoder.settings['model']} makes vectors of {encoder.dimension} "
                f"values, {path} holds vectors of {dimension}: give the model that built the index"
            )
        if not on_gpu:
            torch.set_num_threads(num_threads)  # for the encoder too, as more cost more than they give
        self._index: VectorScan | FaissIndex
        if self.name == "faiss":
            self._index = FaissIndex(index, path, faiss_gpu, faiss_nprobe, num_threads, report)
            details = self._index.details
        else:
            device_name = f"{torch.cuda.device_count()} GPUs" if on_gpu else "CPU"
            details = {"vectors": str(vectors.dtype), "search": device_name}
            if not on_gpu:
                report(check_fits(path, vectors.nbytes, ADVICE))
            parts = place_on_gpus(vectors, report) if on_gpu else [torch.from_numpy(vectors)]
            self._index = VectorScan(parts)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        self._mapped = MappedFiles([*files, sidecar_path(corpus.path)])
        self.num_documents = num_vectors
        sizes = {"index_path": str(path), "num_documents": num_vectors, "dimension": dimension}
        self._description = {"backend": self.name, **sizes, "encoder": encoder.describe(), **details}

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return for each query at most `topk` passages, and their scores.

        These are the passages with the highest inner products that the index finds. Raises IndexCut if a file
        was cut.
        """
        self._mapped.check()
        if not queries:
            return [], []
        scores, rows = self._index.search(self._encoder.encode_queries(queries), topk)
        return [self._corpus.rows(row.tolist()) for row in rows], [score.tolist() for score in scores]

    def describe(self) -> dict[str, Any]:
        return self._description

    def close(self) -> None:
        self._mapped.close()
        self._index.close()
