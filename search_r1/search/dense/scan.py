"""Exact search by torch: every vector is multiplied, chunk by chunk, on the CPU or on all GPUs.

    vectors -> a tensor mapped from the file (CPU), or a float16 tensor on each GPU
    queries [Q, D] -> for each chunk of rows: float32 product, its best k + EXTRA_ROWS -> merged over chunks
                   -> these few rows scored again, in double precision -> top k, ties by row

One query alone, on the CPU, is multiplied with more rows at once, and with float16 rows by half_products.py.

The order in which a product is summed depends on the shape of the batch, so its scores may be wrong by
ROUNDING. The second scoring is the same for a row in any batch. A query whose dropped rows could still belong
to its top k (because of many equal vectors, say) is scanned once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from search_r1.search.memory import GPU_RESERVE_BYTES, GpuMemory, gpus_short_of, visible_gpus
from verl.utils.text import format_bytes

# How many rows are in float32 at once.
CPU_CHUNK_ROWS = 2048
GPU_CHUNK_ROWS = 32 * 1024
ALONE_CHUNKS = 32  # chunks of the CPU that are multiplied at once with one query alone
EXTRA_ROWS = 8  # rows kept beside k, which make a second scan rare
MAX_QUERIES = 512  # the most queries of one scan
ROUNDING = 1e-5  # as a share of |query| |row|; it is more than the error of a float32 sum


def dot_rows(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the inner product of each row of `vectors` [n, D] with the same row of `queries`: float32 [n].

    A pair gets the same bits whatever other pairs are there.
    """
    return (vectors.astype(np.float64) * queries).sum(axis=1).astype(np.float32)


def place_on_gpus(vectors: np.ndarray, report: Callable[[str], None]) -> list[torch.Tensor]:
    """Copy vectors [N, D] to all visible GPUs.

    Raises ValueError before it begins if they don't fit.
    """
    num_rows, dimension = vectors.shape
    report(check_parts_fit(num_rows, dimension, visible_gpus()))
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return copy_to(devices, vectors)


def check_parts_fit(num_rows: int, dimension: int, gpus: Sequence[GpuMemory]) -> str:
    """Return a line about vectors [num_rows, dimension] in equal parts on these GPUs.

    Raises ValueError if they don't fit.
    """
    need = -(-num_rows // len(gpus)) * dimension * 2 + GPU_RESERVE_BYTES
    free = min(gpu.free for gpu in gpus)
    size = (
        f"{num_rows:,} x {dimension} in float16: {format_bytes(need)} on each of {len(gpus)} GPUs with "
        f"working memory, {format_bytes(free)} free"
    )
    if short := gpus_short_of([need] * len(gpus), gpus):
        raise ValueError(
            f"the exact index doesn't fit: {size}: {short}. Free the memory of these GPUs, use more of them "
            "(CUDA_VISIBLE_DEVICES), search on the CPU, or build a FAISS index that needs less "
            "(--faiss_type IVF4096,SQ8)"
        )
    return size


def copy_to(devices: list[torch.device], vectors: np.ndarray) -> list[torch.Tensor]:
    """Return the vectors in float16, neighbouring rows in equal parts on each device.

    Raises ValueError for values that float16 can't hold.
    """
    size = -(-len(vectors) // len(devices))
    parts = []
    for first, device in zip(range(0, len(vectors), size), devices, strict=False):
        rows = vectors[first : first + size]
        part = torch.empty(rows.shape, dtype=torch.float16, device=device)
        for start in range(0, len(rows), GPU_CHUNK_ROWS):
            chunk = torch.from_numpy(rows[start : start + GPU_CHUNK_ROWS]).to(device).half()
            if not bool(torch.isfinite(chunk).all()):
                raise ValueError("the index has values that float16 can't hold: search on the CPU")
            part[start : start + len(chunk)] = chunk
        parts.append(part)
    return parts


class VectorScan:
    """The top k of inner products over stored vectors. It is used by one thread at a time."""

    @torch.inference_mode()
    def __init__(self, parts: list[torch.Tensor]) -> None:
        """Take the vectors to search. All of them are read once.

        `parts` are neighbouring rows [n, D] float16 or float32, each on the device where it is searched.
        """
        self._parts = parts
        self._chunks: list[tuple[int, torch.Tensor]] = []  # first row, rows
        self.num_rows = 0
        for part in parts:
            for chunk in part.split(CPU_CHUNK_ROWS if part.device.type == "cpu" else GPU_CHUNK_ROWS):
                self._chunks.append((self.num_rows, chunk))
                self.num_rows += len(chunk)
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._on_cpu = all(part.device.type == "cpu" for part in parts)
        self._pool: ThreadPoolExecutor | None = None  # for float16 rows and one query
        if self._on_cpu and any(part.dtype == torch.float16 for part in parts):
            from search_r1.search.dense import half_products  # it needs numba, others don't

            if half_products.can_widen():
                self._pool = ThreadPoolExecutor(torch.get_num_threads(), "products")
                self._half_products = half_products.half_products
        self._longest = max(float(self._as_float32(chunk).norm(dim=1).max()) for _, chunk in self._chunks)

    def close(self) -> None:
        self._chunks = []
        self._parts = []
        self._buffers = {}
        if self._pool is not None:
            self._pool.shutdown()

    @torch.inference_mode()
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best scores and rows of queries [Q, D] float32.

        Scores are float32 and rows int64, both [Q, min(k, N)], best first, ties by row.

        Raises ValueError for values that are not finite numbers.
        """
        k = min(k, self.num_rows)
        num_candidates = min(k + EXTRA_ROWS, self.num_rows)
        queries = np.ascontiguousarray(queries, np.float32)
        if not np.isfinite(queries).all():
            raise ValueError("a query's vector has a value that is not a finite number")
        scores = np.empty((len(queries), k), np.float32)
        rows = np.empty((len(queries), k), np.int64)
        slack = ROUNDING * np.linalg.norm(queries, axis=1) * self._longest
        for start in range(0, len(queries), MAX_QUERIES):
            best, best_rows = self._scan(queries[start : start + MAX_QUERIES], num_candidates)
            for number in range(start, start + len(best)):
                query = queries[number]
                scores[number], rows[number] = self._best(query, best_rows[number - start], k)
                limit = float(scores[number, -1] - slack[number])
                if num_candidates < self.num_rows and best[number - start, -1] >= limit:
                    scores[number], rows[number] = self._best(query, self._rows_above(query, limit), k)
        return scores, rows

    def _scan(self, queries: np.ndarray, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
        """Return products float32 and rows [Q, kept], best first, from one pass over all vectors."""
        if len(queries) == 1 and self._on_cpu:
            return self._scan_alone(queries[0], num_candidates)
        best_on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        queries_on = {part.device: torch.from_numpy(queries).to(part.device) for part in self._parts}
        for first, chunk in self._chunks:  # on GPUs the loop only puts work on their queues
            products = queries_on[chunk.device] @ self._as_float32(chunk).T
            top = products.topk(min(num_candidates, len(chunk)), dim=1)
            pairs = [(top.values, top.indices + first)]
            if chunk.device in best_on:
                pairs.insert(0, best_on[chunk.device])
            best_on[chunk.device] = _merge(pairs, num_candidates)
        best, rows = _merge(
            [(products.cpu(), rows.cpu()) for products, rows in best_on.values()], num_candidates
        )
        return best.numpy(), rows.numpy()

    def _scan_alone(self, query: np.ndarray, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
        """Do what `_scan` does for one query [D] on the CPU."""
        pairs = []
        first = 0
        for part in self._parts:
            for rows in part.split(ALONE_CHUNKS * CPU_CHUNK_ROWS):
                top = self._products(rows, query).topk(min(num_candidates, len(rows)))
                pairs.append((top.values[None], top.indices[None] + first))
                first += len(rows)
        best, best_rows = _merge(pairs, num_candidates)
        return best.numpy(), best_rows.numpy()

    def _products(self, rows: torch.Tensor, query: np.ndarray) -> torch.Tensor:
        """Return the products of rows [N, D] on the CPU with a query [D]: float32 [N]."""
        if rows.dtype == torch.float32:
            return torch.mv(rows, torch.from_numpy(query))
        if self._pool is None:
            chunks = rows.split(CPU_CHUNK_ROWS)
            return torch.cat([torch.mv(self._as_float32(chunk), torch.from_numpy(query)) for chunk in chunks])
        products = np.empty(len(rows), np.float32)
        size = -(-len(rows) // torch.get_num_threads())
        jobs = []
        for start in range(0, len(rows), size):
            bits = rows[start : start + size].numpy().view(np.uint16)
            jobs.append(self._pool.submit(self._half_products, bits, query, products[start : start + size]))
        for job in jobs:
            job.result()
        return torch.from_numpy(products)

    def _as_float32(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the chunk's rows in float32.

        They are in the device's one buffer, because new memory costs more than the product.
        """
        if chunk.dtype == torch.float32:
            return chunk
        if chunk.device not in self._buffers:
            rows = max(len(rows) for _, rows in self._chunks)
            self._buffers[chunk.device] = chunk.new_empty(rows, chunk.shape[1], dtype=torch.float32)
        return self._buffers[chunk.device][: len(chunk)].copy_(chunk)

    def _rows_above(self, query: np.ndarray, limit: float) -> np.ndarray:
        """Return all rows whose product is at least `limit`, ascending."""
        rows = []
        for first, chunk in self._chunks:
            products = self._as_float32(chunk) @ torch.from_numpy(query).to(chunk.device)
            rows.append(torch.nonzero(products >= limit).flatten().cpu() + first)
        return torch.cat(rows).numpy()

    def _best(self, query: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best of some rows, scored again."""
        scores = np.empty(len(rows), np.float32)
        first = 0
        for part in self._parts:
            positions = np.flatnonzero((rows >= first) & (rows < first + len(part)))
            for start in range(0, len(positions), CPU_CHUNK_ROWS):
                chunk = positions[start : start + CPU_CHUNK_ROWS]
                index = torch.from_numpy(rows[chunk] - first).to(part.device)
                scores[chunk] = dot_rows(part[index].float().cpu().numpy(), query)
            first += len(part)
        order = np.lexsort((rows, -scores))[:k]
        return scores[order], rows[order]


def _merge(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `num_candidates` best of several (products, rows) [Q, ..], best first."""
    products, rows = (torch.cat(tensors, dim=1) for tensors in zip(*pairs, strict=True))
    top = products.topk(min(num_candidates, products.shape[1]), dim=1)
    return top.values, rows.gather(1, top.indices)
