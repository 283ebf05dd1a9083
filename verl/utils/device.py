"""The device that a process computes on: its name in verl, fast data types of a CPU, compiled functions."""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def get_device_name() -> str:
    """Return "cuda" if there is a CUDA device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a CPU tensor on the device.

    On CUDA the copy goes through pinned memory, so that the host waits neither for the copy nor for earlier
    work of the GPU. The host can submit the next pass while the GPU computes the last one.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on the host, copied if it is on CUDA.

    The host waits for the copy with the first `get`, not before, and not for work that the GPU was given
    after it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # in pinned memory
        self._ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def get(self) -> Tensor:
        if self._ready is not None:
            self._ready.synchronize()
        return self._copy


M_MMAP_THRESHOLD = -3  # glibc's mallopt
OWN_MAPPING_BYTES = 1 << 20  # an allocation of at least this size has a mapping of its own


@cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def free_large_tensors_at_once() -> None:
    """Make the memory of a large CPU tensor go back to the system as soon as the tensor is freed.

    By default glibc raises its threshold to the size of the largest allocation that was freed, up to 32 MB.
    Tensors then lie in its heap, with holes between them (a third more memory in an update of 100M
    parameters). If the environment variable MALLOC_MMAP_THRESHOLD_ is set, it wins.
    """
    if (library := _libc()) is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        library.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)


def return_free_memory() -> None:
    """Return the memory that freed small CPU tensors leave in the heap to the system."""
    if (library := _libc()) is not None:
        library.malloc_trim(0)


MOST_VERSIONS = 64  # versions of compiled code: with and without gradient, autocast, ...


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function with torch.compile, for tensors of any sizes.

    What can't be compiled is computed as it is, with a warning. The options are those of torch.compile. torch
    keeps its settings for each thread, and a backward pass has a thread of its own, so they are set for each
    call.
    """
    fast = torch.compile(function, dynamic=True, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MOST_VERSIONS, suppress_errors=True):
            return fast(*args, **kwargs)

    return call


def bf16_speedup(width: int, inner: int, rounds: int = 7) -> float:
    """Measure how many times as fast as in float32 this CPU multiplies in bfloat16.

    The product is [128, width] by [width, inner], with sizes of at most 2,048. The result is the median over
    rounds that measure both types by turns, some 50 ms in all, in CPU time of the calling thread (torch's
    other threads are not counted).
    """
    x = torch.randn(128, min(width, 2048))
    weight = torch.randn(min(inner, 2048), min(width, 2048))
    pairs = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    ratios = []
    with torch.inference_mode():
        for pair in pairs:
            F.linear(*pair)  # compiles the product
        for _ in range(rounds):
            times = [time.thread_time()]
            for pair in pairs:
                F.linear(*pair)
                times.append(time.thread_time())
            ratios.append((times[1] - times[0]) / max(times[2] - times[1], 1e-9))
    return median(ratios)


class LoadedNccl(NamedTuple):
    """The version of the NCCL library that a process has loaded, and the library's file."""

    version: tuple[int, ...]
    path: str


def loaded_nccl(maps: Path = Path("/proc/self/maps")) -> LoadedNccl | None:
    """Return the NCCL library that this process has loaded, or None if it has none.

    `torch.cuda.nccl.version()` is that of the header with which torch was built (torch/csrc/cuda/nccl.cpp).
    LD_PRELOAD and LD_LIBRARY_PATH can bring another library.

    Args:
        maps: The list of what this process has mapped.
    """
    try:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()]
    except OSError:  # not Linux
        return None
    path = next((path for path in paths if "/libnccl.so" in path), None)
    if path is None:
        return None
    code = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    # From 2.9 on a minor version has two digits.
    thousand = 10_000 if code.value >= 10_000 else 1000
    major, rest = divmod(code.value, thousand)
    return LoadedNccl((major, *divmod(rest, 100)), path)
