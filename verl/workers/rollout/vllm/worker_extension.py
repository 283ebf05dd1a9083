"""What vLLM's worker process learns from us (`worker_extension_cls`): new weights, and our sampler.

vLLM mixes the class into its worker, on every rank; the methods are called with
`collective_rpc("rollout_...")`, in this process or over HTTP.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.workers.rollout.vllm.weights import load_weights

QUALIFIED_NAME = "verl.workers.rollout.vllm.worker_extension.RolloutWorkerExtension"


class RolloutWorkerExtension:
    """Methods for vLLM's `Worker`; `self` is the worker."""

    model_runner: Any

    def rollout_install_sampler(self) -> None:
        """Replace the sampler by one with seeds per session and both kinds of log-prob (`sampler.py`)."""
        from verl.workers.rollout.vllm.sampler import SessionSampler

        self.model_runner.sampler = SessionSampler(self.model_runner)

    def rollout_load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the whole model as (Hugging Face name, full tensor) pairs; the caller drops old KV state."""
        load_weights(self, weights)

    def rollout_release_kv_pages(self) -> int:
        """Give the KV cache's memory back to the system (CPU); its contents are lost. Returns bytes.

        The tensors stay: a page is zero, and takes memory again, when it is next touched.
        """
        before = _resident_bytes()
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.model_runner.kv_caches}
        for address, tensor in storages.items():
            first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (address + tensor.untyped_storage().nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
        return max(0, before - _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
