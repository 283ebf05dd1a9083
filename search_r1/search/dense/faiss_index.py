"""FAISS index files: those that people have from Search-R1, and our own in the same format.

    <name>.index -> read_mapped -> FaissIndex.search: vectors of queries -> scores, rows
    build_index: vectors of the corpus -> train -> add in chunks -> faiss.index

FAISS gives -1 where it found fewer than k, for example in short IVF lists. Such hits are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from search_r1.search.dense.faiss_gpus import check_gpu_copy, copy_to_gpus
from search_r1.search.dense.scan import dot_rows
from search_r1.search.long_work import Progress
from search_r1.search.memory import check_fits, visible_words

INDEX_FILE = "faiss.index"  # what build_index writes
DEFAULT_NPROBE = 64  # lists of an IVF index that a query looks into; FAISS's own default is 1
MIN_EF_SEARCH = 64  # candidates of an HNSW search; FAISS's own default is 16
# Hits of a Flat index beside k. All hits are scored again, so that ties go by row and the bits are the same
# in any batch.
EXTRA_HITS = 8
ADD_ROWS = 64 * 1024
TRAIN_ROWS_PER_LIST = 64  # FAISS asks for 39 to 256
TRAIN_ROWS = 100_000
BLAS_FROM_QUERIES = 20  # with fewer, FAISS multiplies query by query; measured on 384 and 768 dimensions


class FaissIndex:
    """A FAISS index that can be searched. It is called by one thread at a time.

    A Flat or HNSW file and the lists of an IVF file stay memory-mapped. So there is no second copy in this
    process, one copy for all processes, and nothing to wait for at the start.
    """

    def __init__(
        self,
        index: Any,
        path: Path,
        gpu: bool,
        nprobe: int | None,
        num_threads: int,
        report: Callable[[str], None],
    ) -> None:
        """Prepare an index for searches.

        Args:
            index: The result of `read_mapped(path)`.
            path: The file of the index.
            gpu: Copy the index to all GPUs in float16, a part to each.
            nprobe: How many lists of an IVF index a query looks into. None means DEFAULT_NPROBE.
            num_threads: Threads of a search.
            report: Gets lines about what happens.

        Raises:
            ValueError: For an index that can't be searched like that, and when memory is short.
        """
        self.num_rows = int(index.ntotal)
        self._num_threads = num_threads
        ivf = _find_ivf(index)
        if ivf is not None:
            ivf.nprobe = min(nprobe or DEFAULT_NPROBE, ivf.nlist)
        elif nprobe is not None:
            raise ValueError(f"--faiss_nprobe is for IVF indexes, this is {type(index).__name__}")
        # What `describe` says of the index.
        self.details = {
            "index_type": type(index).__name__,
            "nprobe": None if ivf is None else int(ivf.nprobe),
        }
        self._vectors: np.ndarray | None = None  # [N, D] float32 of a Flat index, where they lie
        # FAISS compares this threshold with queries x dimensions. Its default sends batches of up to 333
        # queries of 384 dimensions to the slow path.
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM_QUERIES * index.d
        if gpu:
            report(check_gpu_copy(path))
            index = _to_gpus(index)
        elif isinstance(index, faiss.IndexFlat):
            advice = (
                "Turn it into an exact index in float16, half as large (index_builder --faiss_type exact "
                "--use_fp16 --embedding_path FILE), or into an HNSW64 or IVF4096,SQ8 index"
            )
            report(check_fits(path, path.stat().st_size, advice))
            self._vectors = _rows_of(index)
        self._index: Any = index

    def search(self, queries: np.ndarray, k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return scores and rows of each of the queries [Q, D] float32, ties by row.

        A query has only the hits that FAISS found, at most `k`.
        """
        k = min(k, self.num_rows)
        num_hits = min(k + EXTRA_HITS, self.num_rows) if self._vectors is not None else k
        hnsw = getattr(self._index, "hnsw", None)
        if hnsw is not None:
            hnsw.efSearch = max(MIN_EF_SEARCH, 2 * k)
        faiss.omp_set_num_threads(self._num_threads)  # this counts for the calling thread only
        scores, rows = self._index.search(queries, num_hits)
        if self._vectors is not None:
            exact_scores = dot_rows(self._vectors[rows.ravel()], np.repeat(queries, num_hits, axis=0))
            scores = exact_scores.reshape(scores.shape)
        orders = [np.lexsort((row, -score)) for score, row in zip(scores, rows, strict=True)]
        orders = [order[rows[i][order] >= 0][:k] for i, order in enumerate(orders)]
        return (
            [scores[i][order] for i, order in enumerate(orders)],
            [rows[i][order] for i, order in enumerate(orders)],
        )

    def close(self) -> None:
        self._index = self._vectors = None


def _reason(error: RuntimeError) -> str:
    """Return the last line of what FAISS says."""
    return str(error).strip().split("\n")[-1]


def read_mapped(path: Path) -> Any:
    """Return a FAISS index whose vectors stay in the file.

    Raises ValueError for an index that can't be searched.
    """
    try:
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_MMAP)
        except RuntimeError:  # the kind can't be mapped whole: map the lists of an IVF index, else nothing
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise ValueError(
            f"--index_path: FAISS can't read {path} ({_reason(error)}): not a FAISS index, or not all of it. "
            "A download in parts is joined by `cat part_* > e5_Flat.index`"
        ) from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"--index_path: {path} compares by distance, expected METRIC_INNER_PRODUCT")
    return index


def _find_ivf(index: Any) -> Any:
    """Return the IVF index inside of transforms and the like, or None if there is none."""
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def _rows_of(index: Any) -> np.ndarray:
    """Return the vectors [N, D] float32 of a Flat index, where they lie."""
    values = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
    return values.reshape(index.ntotal, index.d)


def _to_gpus(index: Any) -> Any:
    """Return a copy in float16, in equal parts on all GPUs. Raises ValueError if FAISS can't make it."""
    vectors = _rows_of(index) if isinstance(index, faiss.IndexFlat) else None
    try:
        return copy_to_gpus(faiss, index, vectors)
    except RuntimeError as error:
        raise ValueError(
            f"--faiss_gpu: FAISS can't put {type(index).__name__} on GPUs ({_reason(error)}; "
            f"{visible_words()}): use more GPUs, leave the flag out, or build a Flat or IVF index"
        ) from None


def build_index(vectors: np.ndarray, target: Path, faiss_type: str, gpu: bool, progress: Progress) -> None:
    """Write a FAISS file of vectors.

    Args:
        vectors: [N, D] float16 or float32.
        target: The file to write.
        faiss_type: Any index_factory string: Flat, HNSW64, IVF4096,Flat, IVF65536_HNSW32,SQ8, ... A Flat
            index is streamed to the disk. All others are built in memory.
        gpu: Let FAISS train on the GPUs.
        progress: Is told how far the work is.

    Raises:
        ValueError: For a type that FAISS doesn't know, and for more lists than vectors.
    """
    num_rows, dimension = vectors.shape
    try:
        index = faiss.index_factory(dimension, faiss_type, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"--faiss_type: FAISS can't make {faiss_type!r} of {dimension} dimensions ({_reason(error)}); "
            "examples: Flat, HNSW64, IVF4096,Flat, IVF4096,SQ8, or exact for our own"
        ) from None

    def chunks(stage: str) -> Iterator[np.ndarray]:
        for start in range(0, num_rows, ADD_ROWS):
            yield vectors[start : start + ADD_ROWS].astype(np.float32)
            progress(stage, min(start + ADD_ROWS, num_rows), num_rows)

    if isinstance(index, faiss.IndexFlat):  # FAISS's own writer would need all rows in memory
        with target.open("wb") as file:
            unused = 1 << 20
            metric = faiss.METRIC_INNER_PRODUCT
            file.write(b"IxFI" + struct.pack("<iqqqBi", dimension, num_rows, unused, unused, 1, metric))
            file.write(struct.pack("<Q", num_rows * dimension))
            for chunk in chunks("writing the FAISS index"):
                file.write(chunk.data)
        return
    if not index.is_trained:
        progress("training the FAISS index", 0, 1)
        ivf = _find_ivf(index)
        num_training_rows = TRAIN_ROWS
        if ivf is not None:
            num_training_rows = max(TRAIN_ROWS, TRAIN_ROWS_PER_LIST * ivf.nlist)
            if ivf.nlist > num_rows:
                counts = f"{ivf.nlist} lists for {num_rows:,} passages"
                raise ValueError(f"--faiss_type: {counts}, expected 39 or more for each")
            if gpu:
                on_gpus = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(ivf.d))
                ivf.clustering_index = on_gpus  # FAISS only keeps a pointer, so the name must live on
        index.train(vectors[:: max(1, num_rows // num_training_rows)].astype(np.float32))
    for chunk in chunks("adding to the FAISS index"):
        index.add(chunk)
    faiss.write_index(index, str(target))
