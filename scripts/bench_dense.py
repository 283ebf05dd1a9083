"""Compare exact dense search with FAISS Flat: CPU milliseconds of a search, in one process, by turns.

    pip install faiss-cpu
    python scripts/bench_dense.py

    random vectors of length 1 -> VectorScan and FAISS's index over the same ones
        -> for each batch size: FAISS, then ours, again and again -> medians

FAISS's index is IndexFlatIP for float32 and IndexScalarQuantizer with QT_fp16 for float16, which the types
"Flat" and "SQfp16" mean. Both sides have one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import faiss  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from search_r1.search.dense.scan import VectorScan  # noqa: E402

TOPK = 3


def cpu_ms(search: Callable[[], object]) -> float:
    start = time.process_time()
    search()
    return (time.process_time() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num_vectors", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="queries of a search")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((options.num_vectors, options.dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    print("| vectors | queries | FAISS, CPU ms | ours, CPU ms | ours is |\n|---|--:|--:|--:|--:|")
    for dtype in (np.float32, np.float16):
        if dtype == np.float32:
            theirs = faiss.IndexFlatIP(options.dimension)
        else:
            kind = faiss.ScalarQuantizer.QT_fp16
            theirs = faiss.IndexScalarQuantizer(options.dimension, kind, faiss.METRIC_INNER_PRODUCT)
            theirs.train(vectors[:1])
        theirs.add(vectors)
        ours = VectorScan([torch.from_numpy(vectors.astype(dtype))])
        for num_queries in options.batches:
            queries = rng.standard_normal((num_queries, options.dimension), dtype=np.float32)
            searches = {
                "theirs": lambda q=queries, index=theirs: index.search(q, TOPK),
                "ours": lambda q=queries, index=ours: index.search(q, TOPK),
            }
            times: dict[str, list[float]] = {name: [] for name in searches}
            for search in searches.values():
                search()
            for _ in range(options.rounds):
                for name, search in searches.items():
                    times[name].append(cpu_ms(search))
            their_ms = median(times["theirs"])
            our_ms = median(times["ours"])
            name = np.dtype(dtype).name
            print(
                f"| {name} | {num_queries} | {their_ms:.1f} | {our_ms:.1f} | {their_ms / our_ms:.2f} x |",
                flush=True,
            )
        ours.close()


if __name__ == "__main__":
    main()
