"""FAISS index files: those that people have from Search-R1, and our own in the same format.

    FaissRetriever: <name>.index, memory-mapped -> queries -> Encoder -> faiss -> rows -> documents
    build_index: embeddings (of the corpus, or of an exact index) -> train -> add in chunks -> faiss.index

A row of the index is a row of the corpus. Scores are inner products. FAISS gives -1 where it found fewer
than k (in short IVF lists, say): such hits are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from search_r1.search.corpus import Corpus
from search_r1.search.dense.embeddings import Embeddings
from search_r1.search.dense.encoder import Encoder
from search_r1.search.dense.exact import (
    DenseBuildOptions,
    Progress,
    check_dimension,
    prepare_folder,
    write_embeddings,
)
from search_r1.search.dense.scan import dot_rows
from search_r1.search.manifest import read_manifest
from search_r1.search.memory import available_bytes, format_bytes
from search_r1.search.retriever import SearchResult

INDEX_FILE = "faiss.index"  # what build_index writes
DEFAULT_NPROBE = 64  # lists of an IVF index that a query looks into; FAISS's own default is 1
MIN_EF_SEARCH = 64  # candidates of an HNSW search; FAISS's own default is 16
EXTRA_HITS = 8  # of a Flat index beside k, scored again: ties by row, and the same bits in any batch
ADD_ROWS = 64 * 1024
TRAIN_ROWS_PER_LIST = 64  # FAISS asks for 39 to 256
TRAIN_ROWS = 100_000
BLAS_FROM_QUERIES = 20  # below, FAISS multiplies query by query; measured on 384 and 768 dimensions
GPU_RESERVE_BYTES = 3 << 30  # of each GPU: FAISS's scratch memory and the encoder


class FaissRetriever:
    """Searches a FAISS file. Called by one thread at a time.

    A Flat or HNSW file and the lists of an IVF file stay memory-mapped: no second copy in this process, one
    copy for all processes, nothing to wait for at the start.
    """

    name = "faiss"

    def __init__(
        self,
        corpus: Corpus,
        index_path: str | Path,
        encoder: Encoder,
        gpu: bool = False,
        nprobe: int | None = None,
        num_threads: int = 1,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Opens the file. `gpu`: copies it to all GPUs in float16, a part to each. `nprobe`: for IVF.

        Raises ValueError when file, corpus and encoder don't belong together, and when memory is short.
        """
        self._path, self._corpus, self._encoder = Path(index_path), corpus, encoder
        self._num_threads = num_threads
        if encoder.device.type == "cpu":
            torch.set_num_threads(num_threads)
        index = read_mapped(self._path)
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError(
                f"--index_path: {self._path} compares by distance, expected METRIC_INNER_PRODUCT"
            )
        if index.ntotal != len(corpus):
            raise ValueError(
                f"--index_path: {self._path} holds {index.ntotal:,} vectors, the corpus {len(corpus):,} "
                "passages: give the corpus that the index was built from"
            )
        check_dimension(encoder, index.d, self._path)
        self.num_documents = int(index.ntotal)
        self._kind = type(index).__name__
        self._flat = isinstance(index, faiss.IndexFlat) and not gpu
        self._nprobe = _set_nprobe(index, nprobe)
        if gpu:
            index = _to_gpus(index, report)
        elif isinstance(index, faiss.IndexFlat):
            _check_flat(self._path, available_bytes())
        # FAISS compares it with queries x dimensions; its default sends batches of up to 333 queries of 384
        # dimensions to the slow path.
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM_QUERIES * encoder.dimension
        self._index: Any = index
        self._vectors = flat_vectors(index) if self._flat else None

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """For each query at most `topk` passages with the highest inner products that the index finds."""
        if not queries:
            return [], []
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self.search(vectors, topk)
        return [self._corpus.rows(row.tolist()) for row in rows], [score.tolist() for score in scores]

    def search(self, vectors: np.ndarray, topk: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Scores and rows of each of the queries [Q, D] float32; only hits that are there, ties by row."""
        k = min(topk, self.num_documents)
        num_hits = min(k + EXTRA_HITS, self.num_documents) if self._vectors is not None else k
        hnsw = getattr(self._index, "hnsw", None)
        if hnsw is not None:
            hnsw.efSearch = max(MIN_EF_SEARCH, 2 * k)
        faiss.omp_set_num_threads(self._num_threads)  # it counts for the calling thread only
        scores, rows = self._index.search(vectors, num_hits)
        if self._vectors is not None:
            again = dot_rows(self._vectors[rows.ravel()], np.repeat(vectors, num_hits, axis=0))
            scores = again.reshape(scores.shape)
        found_scores, found_rows = [], []
        for score, row in zip(scores, rows, strict=True):
            score, row = score[row >= 0], row[row >= 0]
            order = np.lexsort((row, -score))[:k]
            found_scores.append(score[order])
            found_rows.append(row[order])
        return found_scores, found_rows

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "faiss",
            "index_path": str(self._path),
            "index_type": self._kind,
            "num_documents": self.num_documents,
            "dimension": self._encoder.dimension,
            "nprobe": self._nprobe,
            "encoder": self._encoder.describe(),
        }

    def close(self) -> None:
        self._index = self._vectors = None


def read_mapped(path: Path) -> Any:
    """A FAISS index whose vectors stay in the file. Raises ValueError when it can't be read."""
    if not path.is_file():
        raise ValueError(f"--index_path: there is no file {path}")
    try:
        try:
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_MMAP)
        except RuntimeError:  # a kind that can't be mapped whole: only the lists of an IVF, then nothing
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1]
        raise ValueError(
            f"--index_path: FAISS can't read {path} ({reason}): not a FAISS index, or not all of it. "
            "A download in parts is joined by `cat part_* > e5_Flat.index`"
        ) from None


def flat_vectors(index: Any) -> np.ndarray:
    """The stored vectors [N, D] float32 of a Flat index, where they lie."""
    return faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)


def _find_ivf(index: Any) -> Any:
    """The IVF index inside of transforms and the like; None when there is none."""
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def _set_nprobe(index: Any, nprobe: int | None) -> int | None:
    ivf = _find_ivf(index)
    if ivf is None:
        if nprobe is not None:
            raise ValueError(f"--faiss_nprobe is for IVF indexes, this is {type(index).__name__}")
        return None
    ivf.nprobe = min(nprobe or DEFAULT_NPROBE, ivf.nlist)
    return int(ivf.nprobe)


def _check_flat(path: Path, available: int) -> None:
    size = path.stat().st_size
    if size > available:
        raise ValueError(
            f"{path} has {format_bytes(size)}, every search reads all of it, and {format_bytes(available)} "
            "of memory are available. Turn it into an exact index in float16, half as large (index_builder "
            "--faiss_type exact --use_fp16 --embedding_path FILE), or into an HNSW64 or IVF4096,SQ8 index"
        )


def _to_gpus(index: Any, report: Callable[[str], None]) -> Any:
    """A copy in float16, in equal parts on all GPUs. Raises ValueError without GPUs or room."""
    if not hasattr(faiss, "index_cpu_to_all_gpus") or not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            "--faiss_gpu: this FAISS was built without GPUs (faiss-cpu): pip uninstall faiss-cpu, then pip "
            "install faiss-gpu; or leave the flag out; or build an exact index, which uses GPUs by itself"
        )
    num_gpus = faiss.get_num_gpus()
    if num_gpus == 0:
        raise ValueError("--faiss_gpu: FAISS sees no GPU (nvidia-smi shows what is there)")
    need = index.ntotal * index.d * 2 // num_gpus + GPU_RESERVE_BYTES
    if torch.cuda.is_available():
        free = min(torch.cuda.mem_get_info(number)[0] for number in range(num_gpus))
        report(f"FAISS: {format_bytes(need)} on each of {num_gpus} GPUs, {format_bytes(free)} free")
        if free < need:
            raise ValueError(
                f"--faiss_gpu: the index needs {format_bytes(need)} on each of {num_gpus} GPUs, "
                f"{format_bytes(free)} are free: use more GPUs, or leave the flag out"
            )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1]
        raise ValueError(
            f"--faiss_gpu: FAISS can't put {type(index).__name__} on GPUs ({reason}): leave the flag out, "
            "or build a Flat or IVF index"
        ) from None


@dataclass(frozen=True)
class FaissBuildOptions:
    """How to build a FAISS file.

    faiss_type: any index_factory string: Flat, HNSW64, IVF4096,Flat, IVF65536_HNSW32,SQ8, ...
    dense: makes the vectors from the corpus; or `exact_folder`: a finished exact index that has them.
    gpu: let FAISS train on a GPU.
    """

    faiss_type: str = "Flat"
    dense: DenseBuildOptions | None = None
    exact_folder: Path | None = None
    gpu: bool = False


def build_index(
    corpus: Corpus, folder: Path, options: FaissBuildOptions, progress: Progress
) -> dict[str, Any]:
    """Writes `folder`/INDEX_FILE. After a kill the vectors are there, training and adding start again.

    Raises ValueError for a type that FAISS doesn't know, and when an index that has to be built in memory
    doesn't fit there. A Flat index is streamed to the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, embeddings = _vectors(corpus, folder, options, progress)
    index = _make_empty(embeddings.dimension, options.faiss_type)
    target = folder / INDEX_FILE
    if isinstance(index, faiss.IndexFlat):
        write_flat(embeddings, target, progress)
    else:
        _check_memory(index, embeddings, options.faiss_type)
        _train(index, embeddings, options.gpu, progress)
        for start in range(0, len(embeddings), ADD_ROWS):
            index.add(embeddings.rows(slice(start, start + ADD_ROWS)))
            progress("adding to the FAISS index", min(start + ADD_ROWS, len(embeddings)), len(embeddings))
        faiss.write_index(index, str(target))
    return {"encoder": settings, "faiss_type": options.faiss_type, "dimension": embeddings.dimension}


def _vectors(
    corpus: Corpus, folder: Path, options: FaissBuildOptions, progress: Progress
) -> tuple[dict[str, Any], Embeddings]:
    """The encoder's settings and the vectors of all passages."""
    if options.exact_folder is not None:
        manifest = read_manifest(options.exact_folder)
        if manifest is None:
            raise ValueError(f"{options.exact_folder} is no finished exact index")
        values = manifest.parameters
        embeddings = Embeddings.open(options.exact_folder, values["dtype"], values["dimension"])
        if len(embeddings) != len(corpus):
            raise ValueError(
                f"{options.exact_folder} has {len(embeddings):,} rows, the corpus {len(corpus):,}"
            )
        return values["encoder"], embeddings
    if options.dense is None:
        raise ValueError("a FAISS index needs vectors: an encoder, or an exact index")
    parameters = prepare_folder(corpus, folder, options.dense)
    write_embeddings(corpus, folder, options.dense, progress)
    return parameters["encoder"], Embeddings.open(folder, parameters["dtype"], parameters["dimension"])


def _make_empty(dimension: int, faiss_type: str) -> Any:
    try:
        return faiss.index_factory(dimension, faiss_type, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1]
        raise ValueError(
            f"--faiss_type: FAISS can't make {faiss_type!r} of {dimension} dimensions ({reason}); "
            "examples: Flat, HNSW64, IVF4096,Flat, IVF4096,SQ8, or exact for our own"
        ) from None


def _check_memory(index: Any, embeddings: Embeddings, faiss_type: str) -> None:
    """Raises ValueError when the finished index doesn't fit into memory, where FAISS builds it."""
    row_bytes = index.sa_code_size() if _find_ivf(index) is not None else 4 * index.d
    hnsw = getattr(index, "hnsw", None)
    links = 4 * hnsw.nb_neighbors(0) + 8 if hnsw is not None else 8  # HNSW's upper levels are small
    need, available = len(embeddings) * (row_bytes + links) * 11 // 10, available_bytes()
    if need > available:
        raise ValueError(
            f"--faiss_type {faiss_type}: FAISS builds it in memory, about {format_bytes(need)}, and "
            f"{format_bytes(available)} are available. Take a smaller kind (IVF4096,SQ8 or IVF4096,PQ64), "
            "Flat, or exact"
        )


def _train(index: Any, embeddings: Embeddings, gpu: bool, progress: Progress) -> None:
    """Trains on evenly spaced rows."""
    if index.is_trained:
        return
    ivf = _find_ivf(index)
    wanted = max(TRAIN_ROWS, TRAIN_ROWS_PER_LIST * ivf.nlist) if ivf is not None else TRAIN_ROWS
    if ivf is not None and ivf.nlist > len(embeddings):
        raise ValueError(
            f"--faiss_type: {ivf.nlist} lists for {len(embeddings):,} passages, expected 39 or more for each"
        )
    step = max(1, len(embeddings) // wanted)
    progress("training the FAISS index", 0, 1)
    if gpu and ivf is not None and hasattr(faiss, "StandardGpuResources"):
        on_gpus = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(ivf.d))  # held here: FAISS keeps a pointer
        ivf.clustering_index = on_gpus
    index.train(embeddings.rows(slice(None, None, step)))
    progress("training the FAISS index", 1, 1)


def write_flat(embeddings: Embeddings, target: Path, progress: Progress) -> None:
    """An IndexFlatIP file, written row by row: FAISS's own writer would need all rows in memory."""
    num_rows, dimension = embeddings.shape
    unused = 1 << 20
    metric = faiss.METRIC_INNER_PRODUCT
    with target.open("wb") as file:
        file.write(b"IxFI" + struct.pack("<iqqqBi", dimension, num_rows, unused, unused, 1, metric))
        file.write(struct.pack("<Q", num_rows * dimension))
        for start in range(0, num_rows, ADD_ROWS):
            file.write(embeddings.rows(slice(start, start + ADD_ROWS)).data)
            progress("writing the FAISS index", min(start + ADD_ROWS, num_rows), num_rows)
