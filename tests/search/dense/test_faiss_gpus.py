"""FAISS on GPUs: kinds and sizes told from headers, by a table, and errors before anything is read.

No test has a GPU. Sizes are derived from FAISS's own code (github.com/facebookresearch/faiss, commit
02dbb4e42f49aa2ce57cd78977b0e47a11f7cb91):

- faiss/gpu/GpuCloner.cpp:333-434 `clone_Index_to_shards`: Flat is cut by rows, IVF by ids (shard_type 1), and
  nothing else is cut. With one GPU a Flat index is built by `GpuIndexFlat::copyFrom`, in one piece.
- faiss/gpu/GpuClonerOptions.h:25-29: `useFloat16` does not change how IVF-Flat is kept.
- faiss/gpu/impl/FlatIndex.cu:235-295 `FlatIndex::add`: float16 rows, and a norm of 4 bytes, new beside old.
- faiss/gpu/impl/IVFFlat.cu:48-72 and IVFPQ.cu:259-280: bytes of a list. IVFBase.cu:388-420: ids of 8 bytes.
- faiss/gpu/impl/GpuScalarQuantizer.cuh:19-32, IVFPQ.cu:80-102: what can be on a GPU.
- faiss/gpu/StandardGpuResources.cpp:40-52,176-202: 1.5 GiB of temporary memory (less on small GPUs).
"""

from __future__ import annotations

import builtins
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from search_r1.search.dense import faiss_gpus
from search_r1.search.dense.faiss_gpus import (
    GpuMemory,
    bytes_on_each,
    check_copy_fits,
    check_gpu_copy,
    copy_to_gpus,
    problem_of,
)
from search_r1.search.dense.faiss_header import FaissHeader, read_faiss_header

WIKI = 21_015_324
GIB = 1 << 30
GPU_24 = GpuMemory(int(23.2 * GIB), int(23.7 * GIB))
GPU_80 = GpuMemory(78 * GIB, 79 * GIB)


def write_flat_header(path: Path, num_rows: int = WIKI, dimension: int = 768) -> Path:
    """Write a Flat index of any size, whose values are a hole in the file."""
    header = b"IxFI" + struct.pack("<iqqq?iQ", dimension, num_rows, 0, 0, True, 0, num_rows * dimension)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * num_rows * dimension)
    return path


@pytest.mark.parametrize(
    ("faiss_type", "kind", "problem", "problem_on_two"),
    [
        ("Flat", "Flat", "", ""),
        ("SQfp16", "SQ", "", "can't cut an SQ over 2 GPUs"),
        ("SQ8", "SQ", "only in fp16, not in 8bit", "only in fp16"),
        ("IVF4,Flat", "IVF-Flat", "", ""),
        ("IVF4,SQ8", "IVF-SQ", "", ""),
        ("IVF4,SQ4", "IVF-SQ", "", ""),
        ("IVF4,SQbf16", "IVF-SQ", "no IVF-SQ in bf16", "no IVF-SQ in bf16"),
        ("IVF4,PQ8", "IVF-PQ", "", ""),
        ("IVF4,PQ6", "IVF-PQ", "no IVF-PQ of 6 codes", "no IVF-PQ of 6 codes"),
        ("IVF4,PQ8x4", "IVF-PQ", "8 bits, not of 4", "8 bits, not of 4"),
        ("PCA16,IVF4,SQ8", "IVF-SQ", "", ""),
        ("RR16,IVF4,PQ4", "IVF-PQ", "", ""),
        ("L2norm,Flat", "Flat", "", ""),
        ("IDMap,Flat", "Flat", "", ""),
        ("HNSW8", "HNSW", "no HNSW for GPUs", "no HNSW for GPUs"),
        ("IVF4_HNSW8,Flat", "IVF-Flat", "lists are found by HNSW", "lists are found by HNSW"),
        ("PQ8", "PQ", "no PQ for GPUs", "no PQ for GPUs"),
    ],
)
def test_the_kind_and_the_sizes_stand_in_the_header(tmp_path, faiss_type, kind, problem, problem_on_two):
    faiss = pytest.importorskip("faiss")
    num_rows = 0 if "PQ" in faiss_type else 300  # to train it takes seconds
    rows = np.random.default_rng(0).standard_normal((300, 24), np.float32)
    index = faiss.index_factory(24, faiss_type, faiss.METRIC_INNER_PRODUCT)
    if num_rows:
        index.train(rows)
        if "IDMap" in faiss_type:
            index.add_with_ids(rows, np.arange(300))
        else:
            index.add(rows)
    path = tmp_path / "a.index"
    faiss.write_index(index, str(path))
    header = read_faiss_header(path)
    assert header.kind == kind
    assert header.num_rows == num_rows
    assert header.dimension == (16 if faiss_type.startswith(("PCA", "RR")) else 24)
    assert header.num_lists == (4 if "IVF" in faiss_type else 0)
    assert problem in problem_of(header, 1) and bool(problem) == bool(problem_of(header, 1))
    assert problem_on_two in problem_of(header, 2) and bool(problem_on_two) == bool(problem_of(header, 2))


E5 = FaissHeader("Flat", 768, WIKI)
IVF = {"dimension": 768, "num_rows": WIKI, "num_lists": 4096, "quantizer": "Flat"}


@pytest.mark.parametrize(
    ("header", "gpus", "gib_on_each", "message"),
    [
        (E5, [GPU_24] * 2, 15.1, None),  # 60 GiB of a file, 30 as float16
        (E5, [GPU_24], 30.2, "GPU 0 has 24.9 GB of 25.4 GB free"),
        (E5, [GPU_80], 30.2, None),
        (E5, [GPU_24, GpuMemory(10 * GIB, GPU_24.total)], 15.1, "GPU 1 has 10.7 GB of 25.4 GB free"),
        (FaissHeader("IVF-Flat", **IVF), [GPU_24] * 2, 30.4, "GPU 0 has"),  # float32, whatever the flag
        (FaissHeader("IVF-Flat", **IVF), [GPU_80], 60.5, None),
        (FaissHeader("IVF-SQ", **IVF, scalar_type="8bit", value_bits=8), [GPU_24], 15.3, None),
        (FaissHeader("IVF-SQ", **IVF, scalar_type="fp16", value_bits=16), [GPU_24], 30.3, "GPU 0 has"),
        (FaissHeader("IVF-PQ", **IVF, num_codes=96), [GPU_24], 2.06, None),
        (FaissHeader("SQ", 768, WIKI, scalar_type="fp16", value_bits=16), [GPU_24], 60.3, "GPU 0 has"),
        (FaissHeader("SQ", 768, WIKI, scalar_type="fp16", value_bits=16), [GPU_80], 60.3, None),
    ],
)
def test_sizes_are_accepted_or_refused_gpu_by_gpu(header, gpus, gib_on_each, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert bytes_on_each(header, len(gpus)) / GIB == pytest.approx(gib_on_each, rel=0.01)
    if message is None:
        assert "(CUDA_VISIBLE_DEVICES=2,3)" in check_copy_fits(Path("e5.index"), header, gpus)
        return
    with pytest.raises(ValueError, match=message) as error:
        check_copy_fits(Path("e5.index"), header, gpus)
    assert "(CUDA_VISIBLE_DEVICES=2,3)" in str(error.value) and "\n" not in str(error.value)


def test_the_scratch_memory_follows_the_size_of_the_gpu():
    sizes = [faiss_gpus.scratch_bytes(total) / GIB for total in (4 * GIB, 8 * GIB, 24 * GIB)]
    assert sizes == [0.5, 1, 1.5]


def gpu_build(num_gpus: int) -> SimpleNamespace:
    return SimpleNamespace(StandardGpuResources=None, get_num_gpus=lambda: num_gpus)


def test_what_this_python_lacks_is_one_line_before_the_index_is_read(tmp_path, monkeypatch):
    path = write_flat_header(tmp_path / "e5_Flat.index")

    def message() -> str:
        with pytest.raises(ValueError) as error:
            check_gpu_copy(path)
        assert "\n" not in str(error.value) and str(error.value).startswith("--faiss_gpu: ")
        return str(error.value)

    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace())
    assert "built without GPUs (faiss-cpu): pip uninstall -y faiss-cpu, then pip install" in message()
    monkeypatch.setitem(sys.modules, "faiss", gpu_build(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "FAISS sees no GPU (CUDA_VISIBLE_DEVICES=; nvidia-smi" in message()
    monkeypatch.setitem(sys.modules, "faiss", gpu_build(2))
    monkeypatch.setattr(faiss_gpus, "visible_gpus", lambda: [GPU_24, GPU_24])
    assert "16.2 GB on each of 2 GPUs, 20.0 GB with scratch" in check_gpu_copy(path)
    monkeypatch.setattr(faiss_gpus, "visible_gpus", lambda: [GPU_24, GpuMemory(GIB, GIB)])
    assert "GPU 1 has 1.1 GB of 1.1 GB free" in message()
    monkeypatch.setattr(faiss_gpus, "visible_gpus", list)  # torch without CUDA
    assert "to 2 GPUs, whose free memory torch can't see" in check_gpu_copy(path)

    monkeypatch.delitem(sys.modules, "faiss")
    imported = builtins.__import__

    def without_cuda(name: str, *args, **kwargs):
        if name == "faiss":  # what faiss-gpu 1.15.1 raises without its CUDA libraries
            raise RuntimeError("faiss-gpu installed but nvidia-cuda-runtime-cu12 is missing")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cuda)
    assert "FAISS can't be loaded (faiss-gpu installed but nvidia-cuda-runtime-cu12 is missing)" in message()


def test_a_header_that_is_cut_is_one_line(tmp_path):
    path = tmp_path / "cut.index"
    path.write_bytes(b"IxFI" + bytes(10))
    with pytest.raises(ValueError, match=r"--index_path: found .*cut.index, whose header can't be read"):
        read_faiss_header(path)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_one_gpu_gets_a_flat_index_page_by_page(num_gpus):
    """With one GPU FAISS itself would send all rows at once, in float32."""
    given = []
    added = []

    def to_gpus(index: SimpleNamespace, co: SimpleNamespace) -> SimpleNamespace:
        assert co.useFloat16 and co.shard
        given.append(index.ntotal)
        return SimpleNamespace(add=lambda rows: added.append(len(rows)))

    faiss = gpu_build(num_gpus)
    faiss.GpuMultipleClonerOptions = SimpleNamespace
    faiss.IndexFlat = lambda d, metric_type: SimpleNamespace(d=d, metric_type=metric_type, ntotal=0)
    faiss.index_cpu_to_all_gpus = to_gpus
    copy_to_gpus(faiss, SimpleNamespace(d=4, metric_type=0, ntotal=9), np.zeros((9, 4), np.float32))
    assert (given, added) == (([0], [9]) if num_gpus == 1 else ([9], []))
