"""Dense retrieval with our own index: exact search, on a CPU or over all GPUs.

    queries -> Encoder -> VectorScan -> rows -> documents of the corpus

Index folder: embeddings.f16 or .f32 (see embeddings.py), and the manifest with the encoder's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from search_r1.search.corpus import Corpus
from search_r1.search.dense.embeddings import open_embeddings
from search_r1.search.dense.encoder import Encoder
from search_r1.search.dense.scan import VectorScan, place_on_gpus
from search_r1.search.memory import check_fits
from search_r1.search.retriever import SearchResult


class ExactRetriever:
    """Exact dense search. Called by one thread at a time.

    On a CPU the vectors are memory-mapped: shared by all processes, and given back when memory is short. On
    GPUs they are in their memory, in float16.
    """

    name = "exact"

    def __init__(
        self,
        corpus: Corpus,
        index_path: str | Path,
        encoder: Encoder,
        num_threads: int = 1,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Opens an index folder; searches where the encoder runs: on all visible GPUs, or the CPU.

        Raises ValueError when index, corpus and encoder don't belong together, and when memory is short.
        """
        self._corpus, self._encoder = corpus, encoder
        _, vectors = open_embeddings(Path(index_path), corpus)
        check_dimension(encoder, vectors.shape[1], Path(index_path))
        self._description = {
            "backend": "exact",
            "index_path": str(index_path),
            "num_documents": len(vectors),
            "dimension": vectors.shape[1],
            "vectors": str(vectors.dtype),
            "encoder": encoder.describe(),
        }
        self.num_documents = len(vectors)
        if encoder.device.type == "cuda":
            self._scan = VectorScan(place_on_gpus(vectors, report))
            self._description["search"] = f"{torch.cuda.device_count()} GPUs"
        else:
            report(
                check_fits(
                    Path(index_path),
                    vectors.nbytes,
                    "Use a machine with more memory, a GPU, or a FAISS index that reads less (--faiss_type "
                    "IVF4096,SQ8 or HNSW64)",
                )
            )
            torch.set_num_threads(num_threads)  # of the encoder too: more threads cost more than they give
            self._scan = VectorScan([torch.from_numpy(vectors)])
            self._description["search"] = "CPU"

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """For each query the `topk` passages (all, if there are fewer) with the highest inner products."""
        scores, rows = self._scan.search(self._encoder.encode_queries(queries), topk)
        return [self._corpus.rows(row) for row in rows.tolist()], scores.tolist()

    def describe(self) -> dict[str, Any]:
        return self._description

    def close(self) -> None:
        self._scan.close()


def check_dimension(encoder: Encoder, dimension: int, index_path: Path) -> None:
    """Raises ValueError when the encoder's vectors have another size than the index's."""
    if encoder.dimension != dimension:
        raise ValueError(
            f"--retriever_model: {encoder.settings['model']} makes vectors of {encoder.dimension} values, "
            f"{index_path} holds vectors of {dimension}: give the model that built the index"
        )
