"""Dense retrieval with our own index: exact search, on a CPU or over all GPUs.

    build_index: corpus -> Encoder -> embeddings.f16 | .f32                   in <target>.building, resumable
    ExactRetriever: queries -> Encoder -> VectorScan -> rows -> documents of the corpus

Index folder: embeddings.f16 or .f32 (flat [N, D], row = row of the corpus), and the manifest with the
encoder's settings.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from search_r1.search.corpus import Corpus
from search_r1.search.dense.embeddings import FILES, Embeddings, EmbeddingWriter, flat_header_bytes
from search_r1.search.dense.encoder import Encoder
from search_r1.search.dense.scan import VectorScan
from search_r1.search.manifest import read_manifest
from search_r1.search.memory import available_bytes, format_bytes
from search_r1.search.retriever import SearchResult

STATE_FILE = "encoding.json"
CPU_WINDOW, GPU_WINDOW = 1024, 16 * 1024  # passages sorted by length together, and lost at most by a kill
COPY_ROWS = 16 * 1024

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DenseBuildOptions:
    """How to build the embeddings of a corpus.

    encoders: one for each device (`open_encoders`); each works on other passages. Without any,
    `embedding_path` and `encoder_settings` must be given.
    dtype: float16 (half the size, and scores that differ in the 4th digit) or float32.
    embedding_path: flat float32 file [N, D] to take the vectors from, as Search-R1's `--save_embedding`
    writes it (emb_e5.memmap), or a FAISS Flat file (e5_Flat.index). `encoder_settings`: what made them.
    """

    encoders: tuple[Encoder, ...] = ()
    dtype: str = "float16"
    embedding_path: Path | None = None
    encoder_settings: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The encoder's settings, for the manifest."""
        settings = self.encoder_settings or (self.encoders[0].settings if self.encoders else None)
        if settings is None:
            raise ValueError("the index needs an encoder: --model_path")
        return settings


def build_index(
    corpus: Corpus, folder: Path, options: DenseBuildOptions, progress: Progress
) -> dict[str, Any]:
    """Writes the embeddings of all passages into `folder`; goes on after a kill.

    Returns the parameters for the manifest.
    Raises ValueError for vectors with NaN, for an embedding file of another size than corpus and encoder, and
    when the disk has no room.
    """
    parameters = prepare_folder(corpus, folder, options)
    write_embeddings(corpus, folder, options, progress)
    (folder / STATE_FILE).unlink()
    return parameters


def prepare_folder(corpus: Corpus, folder: Path, options: DenseBuildOptions) -> dict[str, Any]:
    """Makes `folder` ready for `write_embeddings`; removes rows made with other settings or another corpus.

    Returns the parameters for the manifest.
    """
    if options.dtype not in FILES:
        raise ValueError(f"the index's dtype: found {options.dtype!r}, expected {' or '.join(FILES)}")
    folder.mkdir(parents=True, exist_ok=True)
    settings = options.settings
    parameters = {"encoder": settings, "dtype": options.dtype, "dimension": settings["dimension"]}
    text = json.dumps({"parameters": parameters, "corpus": corpus.fingerprint()}, sort_keys=True)
    path = folder / STATE_FILE
    if not path.is_file() or path.read_text() != text:
        for name in FILES.values():
            (folder / name).unlink(missing_ok=True)
        path.write_text(text)
    return parameters


def write_embeddings(corpus: Corpus, folder: Path, options: DenseBuildOptions, progress: Progress) -> None:
    """Fills the embedding file from the row where it ends to the end of the corpus."""
    dimension = options.settings["dimension"]
    writer = EmbeddingWriter(folder, options.dtype, dimension)
    need = (len(corpus) - writer.num_rows) * dimension * np.dtype(options.dtype).itemsize
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ValueError(
            f"{folder}: the index needs {format_bytes(need)} more, the disk has {format_bytes(free)}"
        )
    source = _stored_vectors(corpus, options, writer.num_rows) if options.embedding_path else None
    if source is None:
        source = _encode_from(corpus, options.encoders, writer.num_rows)
    try:
        for vectors in source:
            writer.append(vectors)
            progress("encoding", writer.num_rows, len(corpus))
    finally:
        writer.close()
    if writer.num_rows != len(corpus):
        raise ValueError(
            f"{writer.path} has {writer.num_rows:,} rows, the corpus {len(corpus):,}: remove {folder}"
        )


def _encode_from(corpus: Corpus, encoders: tuple[Encoder, ...], start: int) -> Iterator[np.ndarray]:
    """Vectors of passages in order; the encoders work side by side on windows of passages."""
    if not encoders:
        raise ValueError("the index needs an encoder: --model_path")
    size = GPU_WINDOW if encoders[0].device.type == "cuda" else CPU_WINDOW
    contents = corpus.iter_contents(start)
    windows = iter(lambda: list(islice(contents, size)), [])
    waiting: deque[Future[np.ndarray]] = deque()
    with ThreadPoolExecutor(len(encoders)) as threads:
        free = deque(encoders)

        def encode(texts: list[str]) -> np.ndarray:
            encoder = free.popleft()  # there is one for each thread
            try:
                return encoder.encode_passages(texts)
            finally:
                free.append(encoder)

        for texts in windows:
            waiting.append(threads.submit(encode, texts))
            if len(waiting) > 2 * len(encoders):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _stored_vectors(corpus: Corpus, options: DenseBuildOptions, start: int) -> Iterator[np.ndarray]:
    path = options.embedding_path
    assert path is not None
    dimension = options.settings["dimension"]
    stored = Embeddings(path, "float32", dimension, skip_bytes=flat_header_bytes(path))
    if len(stored) != len(corpus):
        raise ValueError(
            f"--embedding_path: {path} holds {len(stored):,} vectors of {dimension} float32 values, "
            f"the corpus has {len(corpus):,} passages: they don't belong together"
        )
    for begin in range(start, len(stored), COPY_ROWS):
        yield stored.rows(slice(begin, begin + COPY_ROWS))


def open_encoders(**arguments: Any) -> tuple[Encoder, ...]:
    """One encoder for each GPU that is there, or one for the CPU. Arguments as for `Encoder.open`."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    return tuple(Encoder.open(**arguments, device=device) for device in devices)


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
        folder = Path(index_path)
        manifest = read_manifest(folder)
        if manifest is None:
            raise ValueError(f"--index_path: {folder} has no manifest.json: it is no finished index of ours")
        dtype, dimension = manifest.parameters["dtype"], manifest.parameters["dimension"]
        self._corpus, self._encoder, self._folder = corpus, encoder, folder
        self._embeddings = Embeddings.open(folder, dtype, dimension)
        self.num_documents = len(self._embeddings)
        if self.num_documents != len(corpus):
            raise ValueError(
                f"--index_path: {folder} holds {self.num_documents:,} vectors, the corpus {len(corpus):,} "
                "passages: give the corpus that the index was built from"
            )
        check_dimension(encoder, dimension, folder)
        if encoder.device.type == "cuda":
            self._scan = VectorScan.on_devices(self._embeddings, report=report)
        else:
            report(check_cpu(self._embeddings, available_bytes()))
            torch.set_num_threads(num_threads)  # of the encoder too: more threads cost more than they give
            self._scan = VectorScan.on_cpu(self._embeddings)

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """For each query the `topk` passages (all, if there are fewer) with the highest inner products."""
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self._scan.search(vectors, topk)
        documents = self._corpus.rows(rows.ravel().tolist())
        k = rows.shape[1]
        return [documents[i * k : (i + 1) * k] for i in range(len(queries))], scores.tolist()

    def describe(self) -> dict[str, Any]:
        on_gpu = self._encoder.device.type == "cuda"
        return {
            "backend": "exact",
            "index_path": str(self._folder),
            "num_documents": self.num_documents,
            "dimension": self._embeddings.dimension,
            "vectors": self._embeddings.dtype,
            "search": f"{torch.cuda.device_count()} GPUs" if on_gpu else "CPU",
            "encoder": self._encoder.describe(),
        }

    def close(self) -> None:
        self._scan.close()


def check_dimension(encoder: Encoder, dimension: int, index_path: Path) -> None:
    """Raises ValueError when the encoder's vectors have another size than the index's."""
    if encoder.dimension != dimension:
        raise ValueError(
            f"--retriever_model: {encoder.settings['model']} makes vectors of {encoder.dimension} values, "
            f"{index_path} holds vectors of {dimension}: give the model that built the index"
        )


def check_cpu(embeddings: Embeddings, available: int) -> str:
    """A line with the size of what a search reads. Raises ValueError when memory can't hold it."""
    num_rows, dimension = embeddings.shape
    size = (
        f"{num_rows:,} x {dimension}: vectors of {format_bytes(embeddings.num_bytes)}, memory-mapped; "
        f"{format_bytes(available)} of memory are available"
    )
    if embeddings.num_bytes > available:
        raise ValueError(
            f"the exact index doesn't fit: {size}, and every search reads all of it. Use a machine with more "
            "memory, a GPU, or a FAISS index that reads less (--faiss_type IVF4096,SQ8 or HNSW64)"
        )
    return size
