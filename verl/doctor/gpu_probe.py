"""`python -m verl.doctor.gpu_probe`: a short matmul on each GPU of this machine, in a process of its own.

Prints one JSON object: GPU number -> {"matmul_s", "is_right"} or {"problem"}. In a process of its own because
one that has used a GPU holds some of its memory to its end, and because a broken GPU may take it along.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

SIZE = 8192  # two matrices and a product in bfloat16: 400 MB, 1.1e12 operations
REPEATS = 8


def probe(device: torch.device, size: int = SIZE, repeats: int = REPEATS) -> dict[str, Any]:
    """Seconds of a product of [size, size] matrices, the fastest of `repeats`, and whether all were the same.

    A GPU that is throttled or shared is slower than its neighbours; one whose memory fails gives other bits.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    first, fastest, is_right = left @ right, float("inf"), True
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        product = left @ right
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
        is_right = is_right and bool(torch.equal(product, first)) and bool(product.isfinite().all())
    return {"matmul_s": fastest, "is_right": is_right}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    for index in range(torch.cuda.device_count()):
        try:
            found[str(index)] = probe(torch.device("cuda", index))
        except RuntimeError as error:  # out of memory, or the device itself
            found[str(index)] = {"problem": str(error).splitlines()[0]}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
