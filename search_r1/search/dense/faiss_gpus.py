"""FAISS on GPUs: what its copy of an index takes there, and whether this Python's FAISS can make one.

    header -> problem_of (its kind) -> bytes_on_each GPU --beside free memory--> a line, or an error

Nothing of the index but its header is read, so that a server says in a second what would otherwise be known
after minutes of loading. The sizes are those of the copy that `copy_to_gpus` makes.

The table, by kind, of what FAISS keeps on a GPU (`faiss/gpu`, commit 02dbb4e42f49):

    Flat      float16 values, and the norms of the rows
    SQ        only fp16, on one GPU, as Flat
    IVF-Flat  float32 values, ids of 8 bytes. `useFloat16` does not change the lists.
    IVF-SQ    values of 4 to 16 bits, ids of 8 bytes
    IVF-PQ    one byte for each code, ids of 8 bytes
    others    nothing: HNSW, PQ, an IVF index whose lists are found by HNSW, ... can't be copied
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.search.dense.faiss_header import (
    FLAT,
    IVF_FLAT,
    IVF_PRODUCT_QUANTIZER,
    IVF_SCALAR_QUANTIZER,
    SCALAR_QUANTIZER,
    FaissHeader,
    read_faiss_header,
)
from search_r1.search.memory import (
    GPU_RESERVE_BYTES,
    VISIBLE,
    GpuMemory,
    gpus_short_of,
    visible_gpus,
    visible_words,
)
from verl.utils.text import format_bytes

if TYPE_CHECKING:
    import numpy as np

GIB = 1 << 30
MIB = 1 << 20
INSTALL = "pip uninstall -y faiss-cpu, then pip install -c constraints.txt -e '.[dense,faiss-gpu]'"
LIST_BLOCK = 32  # IVF-Flat and IVF-SQ keep a list in blocks of so many vectors
ALLOCATION_BYTES = 512  # cudaMalloc rounds up to a multiple
_FLAT_ROW_BYTES = 8  # the norms (float32) of a row, twice while the last rows are added
_CODES_ON_GPUS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # bytes of a vector in IVF-PQ
_SCALARS_ON_GPUS = ("8bit", "8bit_uniform", "8bit_direct", "4bit", "4bit_uniform", "6bit", "fp16")


def problem_of(header: FaissHeader, num_gpus: int | None = None) -> str:
    """Return why FAISS can't search an index of this kind on GPUs, or "" if it can.

    Args:
        header: The header of the index.
        num_gpus: The number of GPUs. None means that it is not known.
    """
    kind = header.kind
    if kind not in (FLAT, SCALAR_QUANTIZER, IVF_FLAT, IVF_SCALAR_QUANTIZER, IVF_PRODUCT_QUANTIZER):
        return f"FAISS has no {kind} for GPUs"
    if header.num_lists and header.quantizer != FLAT:
        return f"its lists are found by {header.quantizer}, which FAISS does not have for GPUs"
    if kind == SCALAR_QUANTIZER and header.scalar_type != "fp16":
        return f"FAISS has an SQ for GPUs only in fp16, not in {header.scalar_type}"
    if kind == SCALAR_QUANTIZER and num_gpus is not None and num_gpus > 1:
        return f"FAISS can't cut an SQ over {num_gpus} GPUs, and would search it on the CPU"
    if kind == IVF_SCALAR_QUANTIZER and header.scalar_type not in _SCALARS_ON_GPUS:
        return f"FAISS has no IVF-SQ in {header.scalar_type} for GPUs"
    if kind == IVF_PRODUCT_QUANTIZER:
        if header.code_bits != 8:
            return f"FAISS has IVF-PQ for GPUs with codes of 8 bits, not of {header.code_bits}"
        if header.num_codes not in _CODES_ON_GPUS:
            return f"FAISS has no IVF-PQ of {header.num_codes} codes for GPUs"
    return ""


def bytes_on_each(header: FaissHeader, num_gpus: int) -> int:
    """Return the bytes that the copy takes on each of so many GPUs, without scratch memory.

    The parts differ by one row at most. Each GPU has all centroids of an IVF index.
    """
    rows = -(-header.num_rows // num_gpus)
    values = header.dimension
    if header.kind == FLAT:
        return rows * (2 * values + _FLAT_ROW_BYTES)
    if header.kind == SCALAR_QUANTIZER:  # it grows page by page, and the old values stay meanwhile
        return rows * (2 * 2 * values + _FLAT_ROW_BYTES)
    lists = header.num_lists
    centroid_bytes = lists * (4 * values + _FLAT_ROW_BYTES)
    # A list has two allocations, each half filled in its last unit, two pointers, and its length.
    list_bytes = lists * (ALLOCATION_BYTES + 3 * 8)
    id_bytes = 8 * rows
    if header.kind == IVF_PRODUCT_QUANTIZER:
        codebook_bytes = 3 * 4 * 256 * values  # in three layouts
        return centroid_bytes + list_bytes + id_bytes + codebook_bytes + rows * header.num_codes
    padded_rows = rows + lists * LIST_BLOCK // 2  # the last block of a list is half full in the mean
    return centroid_bytes + list_bytes + id_bytes + padded_rows * values * header.value_bits // 8


def scratch_bytes(total: int) -> int:
    """Return the temporary memory that FAISS takes of a GPU at once, by the GPU's size."""
    if total <= 4 * GIB:
        return 512 * MIB
    return GIB if total <= 8 * GIB else 1536 * MIB


def _wrong_kind(path: Path, header: FaissHeader, problem: str) -> ValueError:
    """Return the error for an index that FAISS can't search on GPUs."""
    return ValueError(
        f"--faiss_gpu: found {path} ({header}): {problem}; expected Flat, or IVF with Flat, SQ8 or PQ; build "
        "one (index_builder --faiss_type IVF4096,SQ8), or leave the flag out to search on the CPU"
    )


def check_kind(path: Path) -> FaissHeader:
    """Return the header of an index. Raises ValueError if FAISS has no such kind for GPUs."""
    header = read_faiss_header(path)
    if problem := problem_of(header):
        raise _wrong_kind(path, header, problem)
    return header


def check_copy_fits(path: Path, header: FaissHeader, gpus: Sequence[GpuMemory]) -> str:
    """Return a line about the copy of an index on these GPUs.

    Raises ValueError if FAISS can't make it, or if a GPU has not enough memory for its part, for scratch
    memory, CUDA and the encoder.
    """
    if problem := problem_of(header, len(gpus)):
        raise _wrong_kind(path, header, problem)
    copy_bytes = bytes_on_each(header, len(gpus))
    needs = [copy_bytes + scratch_bytes(gpu.total) + GPU_RESERVE_BYTES for gpu in gpus]
    plural = "s" * (len(gpus) > 1)
    per_gpu = f"{format_bytes(copy_bytes)} on each of {len(gpus)} GPU{plural}"
    size = f"{per_gpu}, {format_bytes(max(needs))} with scratch"
    if short := gpus_short_of(needs, gpus):
        raise ValueError(
            f"--faiss_gpu: found {path} ({header}), of which FAISS copies {size}; expected that much free on "
            f"each GPU, but {short}; let it see more or emptier GPUs ({VISIBLE}), leave the flag out, or "
            "build a smaller index (index_builder --faiss_type IVF4096,SQ8)"
        )
    return f"the copy of {path} ({header}) takes {size} memory ({visible_words()})"


def load_gpu_build() -> Any:
    """Return the module `faiss`, which sees a GPU.

    Raises ValueError if it was built without GPUs, finds no CUDA libraries, or sees no GPU.
    """
    advice = "leave the flag out; or build an exact index, which uses GPUs by itself"
    try:
        import faiss
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[-1]
        raise ValueError(f"--faiss_gpu: FAISS can't be loaded ({reason}): {INSTALL}; or {advice}") from None
    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            f"--faiss_gpu: this FAISS was built without GPUs (faiss-cpu): {INSTALL}; or {advice}"
        )
    if faiss.get_num_gpus() == 0:
        raise ValueError(
            f"--faiss_gpu: FAISS sees no GPU ({visible_words()}; nvidia-smi shows what is there): set "
            f"{VISIBLE}, or install NVIDIA's driver; or {advice}"
        )
    return faiss


def check_gpu_copy(path: Path) -> str:
    """Return a line about the copy of an index on all GPUs of this machine, before anything of it is read.

    Raises ValueError if it can't be made.
    """
    header = check_kind(path)
    faiss = load_gpu_build()
    gpus = visible_gpus()
    if len(gpus) != faiss.get_num_gpus():  # torch without CUDA: the encoder runs on the CPU
        return f"copying {path} ({header}) to {faiss.get_num_gpus()} GPUs, whose free memory torch can't see"
    return check_copy_fits(path, header, gpus)


def copy_to_gpus(faiss: Any, index: Any, vectors: np.ndarray | None) -> Any:
    """Return the copy of a CPU index in equal parts on all GPUs.

    On one GPU FAISS would send a Flat index there in one piece, in float32, and take four times the memory of
    the copy meanwhile. So it gets an empty index and adds the rows, which it does page by page.

    Args:
        faiss: The module.
        index: The index on the CPU.
        vectors: The rows [N, D] float32 of a Flat index, or None for another kind.

    Raises:
        RuntimeError: By FAISS.
    """
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    if vectors is None or faiss.get_num_gpus() > 1:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    empty = faiss.IndexFlat(index.d, index.metric_type)
    copy = faiss.index_cpu_to_all_gpus(empty, co=options)
    copy.add(vectors)
    return copy
