"""Decode steps as CUDA graphs: one launch for a whole step, sampling included.

    StepBatch, SamplingRows -> static host arrays -- one copy --> static device tensors -> replay
                                                                        -> [3, B] -- one copy --> host

A graph runs the same kernels on the same addresses each time, so there is one per bucket of batch sizes, made
when it is first needed. Rows beyond the batch are padding: they attend to one position, write to a scratch
block that no sequence owns, and nobody reads what they sample. The tensors that a graph has seen (weights,
pools) must stay where they are; `forget` is for when they don't.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.cuda.sampler import ARRAYS
from verl.workers.rollout.native.cuda.staging import Staging
from verl.workers.rollout.native.sampler import SamplingRows
from verl.workers.rollout.native.step_batch import StepBatch

logger = logging.getLogger(__name__)
_LARGEST = 512  # sequences; above it a step is long enough for launches not to matter


def bucket_of(num_sequences: int) -> int:
    """The batch size that a graph is made for: 1, 2, 4, 8, then multiples of 8, above 256 of 32."""
    if num_sequences <= 8:
        return 1 << (num_sequences - 1).bit_length()
    step = 8 if num_sequences <= 256 else 32
    return -(-num_sequences // step) * step


class Capture(Protocol):
    """How a function that puts work on the device becomes one that repeats it."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(replay, the tensor that each replay fills)."""


class CudaCapture:
    """`Capture` by CUDA graphs that share one memory pool, as no two of them run at a time.

    The pool lives as long as its graphs: after the last one is dropped, take a new `CudaCapture`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces made outside of the capture
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph.replay, result


@dataclass(frozen=True)
class _Graph:
    staging: Staging
    replay: Callable[[], None]
    result: Tensor


class DecodeGraphs:
    """Graphs by (bucket, does any row truncate)."""

    def __init__(
        self,
        run: Callable[[dict[str, Tensor], bool], Tensor],
        new_capture: Callable[[], Capture],
        device: torch.device,
        blocks_per_sequence: int,
        scratch_place: int,
    ) -> None:
        """
        Args:
            run: one decode step from static tensors (those of `_arrays`) and whether rows may truncate, to
                float64 [3, B] (token ids and both log-probs), without waiting for the device.
            new_capture: called once, and again after `forget`.
            blocks_per_sequence: most blocks that a sequence can have.
            scratch_place: place in the flat pool that padding may write to; its block's table entry follows.
        """
        self._run = run
        self._new_capture = new_capture
        self._capture: Capture | None = None
        self._device = device
        self._blocks_per_sequence = blocks_per_sequence
        self._scratch_place = scratch_place
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._failed = False

    def covers(self, batch: StepBatch) -> bool:
        """True if the step is all decode, and small enough."""
        return not self._failed and not batch.spans and 0 < batch.num_decode <= _LARGEST

    def step(self, batch: StepBatch, rows: SamplingRows, truncates: bool) -> Tensor | None:
        """float64 [3, D] on the device; None if the step can't be captured (said once in a warning)."""
        key = bucket_of(batch.num_decode), truncates
        if key not in self._graphs:
            staging = Staging(self._arrays(key[0]), self._device)
            self._fill(staging, batch, rows)
            staging.upload()
            self._capture = self._capture or self._new_capture()
            try:
                replay, result = self._capture(lambda: self._run(staging.device, truncates))
            except RuntimeError as error:  # a kernel that can't be captured; the eager step is right as well
                self._failed = True
                self.forget()
                logger.warning("no CUDA graphs for rollouts, decoding runs eagerly: %s", error)
                return None
            self._graphs[key] = _Graph(staging, replay, result)
        graph = self._graphs[key]
        self._fill(graph.staging, batch, rows)
        graph.staging.upload()
        graph.replay()
        return graph.result[:, : batch.num_decode]

    def forget(self) -> None:
        """Drop all graphs: weights or pools have moved, or their memory is wanted."""
        self._graphs, self._capture = {}, None

    def _arrays(self, size: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        return {
            **dict.fromkeys(("token_ids", "positions", "places", "out_rows"), ((size,), int64)),
            **dict.fromkeys(("lengths", "last", "rows", "ones"), ((size,), int32)),
            "tables": ((size, self._blocks_per_sequence), int32),
            **{name: ((size,), dtype) for name, dtype in ARRAYS.items()},
        }

    def _fill(self, staging: Staging, batch: StepBatch, rows: SamplingRows) -> None:
        host, count = staging.host, batch.num_decode
        paddings = {
            "token_ids": (batch.token_ids, 0),
            "positions": (batch.positions, 0),
            "places": (batch.places, self._scratch_place),
            "lengths": (batch.decode_lengths, 1),
            "last": (batch.decode_lengths - 1, 0),
            "temperature": (rows.temperature, 1.0),
            "top_k": (rows.top_k, 0),
            "top_p": (rows.top_p, 1.0),
            "min_p": (rows.min_p, 0.0),
            "uniform": (rows.uniform, 0.0),
        }
        for name, (values, padding) in paddings.items():
            host[name][:count] = values
            host[name][count:] = padding
        size = len(host["rows"])
        host["rows"][:] = host["out_rows"][:] = np.arange(size)
        host["ones"][:] = 1
        host["tables"][:count, : batch.decode_tables.shape[1]] = batch.decode_tables
        host["tables"][count:] = 0
