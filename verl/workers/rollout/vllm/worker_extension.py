"""What vLLM's worker process learns from us (`worker_extension_cls`): new weights, and our sampler.

vLLM mixes the class into its worker, on every rank; the methods are called with
`collective_rpc("rollout_...")`, in this process or over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
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
