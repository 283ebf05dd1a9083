"""The native engine's model on CUDA: decode steps as graphs, everything else eagerly, no waiting in between.

    decode only:  StepBatch, SamplingRows -> DecodeGraphs -> tokens and log-probs       one copy each way
    with prefill: StepBatch -> one packed copy -> the decoder -> hidden -> sample -> the same

The host waits for the device once per step, for the tokens: stops are found on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.cuda.attention import CudaAttention
from verl.workers.rollout.native.cuda.decoder import FusedDecoder
from verl.workers.rollout.native.cuda.graphs import Capture, CudaCapture, DecodeGraphs
from verl.workers.rollout.native.cuda.kernels import Geometry
from verl.workers.rollout.native.cuda.sampler import ARRAYS, DeviceRows, draw_on_device, row_arrays
from verl.workers.rollout.native.cuda.staging import upload
from verl.workers.rollout.native.cuda.triton_sampler import draw_whole
from verl.workers.rollout.native.model import PagedDecoder, StepTensors
from verl.workers.rollout.native.sampler import SamplingRows, truncates
from verl.workers.rollout.native.step_batch import StepBatch
from verl.workers.rollout.native.weights import ModelWeights


class CudaModel:
    """A decoder on one CUDA device, over the runner's pools. Their last block is for padding to write to."""

    def __init__(
        self,
        spec: ModelSpec,
        tables: Mapping[str | None, tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        max_model_len: int,
        graphs: bool = True,
        compile: bool = False,
        new_capture: Callable[[], Capture] | None = None,
    ) -> None:
        """
        Args:
            tables: from `rotary_tables`.
            graphs: False: decode steps run eagerly too.
            compile: let torch.compile fuse the decoder's steps, in place of our own kernels; it takes minutes
                at the start.
            new_capture: how steps become graphs, by default as CUDA graphs.
        """
        self._device, self._vocab_size, self._logit_softcap = device, spec.vocab_size, spec.logit_softcap
        on_device = {
            kind: (cos.to(device, dtype), sin.to(device, dtype)) for kind, (cos, sin) in tables.items()
        }
        geometry = Geometry(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, dtype, device)
        self._backend = CudaAttention(geometry, spec.softcap)
        self._decoder = PagedDecoder(spec, on_device, self._backend)
        self._forward: Callable[..., Tensor] = FusedDecoder(spec, on_device, self._backend).forward
        if compile:
            self._forward = torch.compile(self._decoder.forward, dynamic=True)
        self._new_capture = (new_capture or partial(CudaCapture, device)) if graphs else None
        self._blocks_per_sequence = -(-max_model_len // block_size)
        self._block_size = block_size
        self._weights: ModelWeights | None = None
        self._addresses: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._graphs: DecodeGraphs | None = None

    def load(self, weights: ModelWeights) -> int:
        """Graphs stay if every matrix is where it was."""
        addresses = [tensor.data_ptr() for tensor in _tensors(weights)]
        if addresses != self._addresses and self._graphs is not None:
            self._graphs.forget()
        self._weights, self._addresses = weights, addresses
        return 0

    def unload(self) -> None:
        self._weights = None

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self._keys, self._values = keys, values
        self._graphs = None
        if keys and self._new_capture is not None:
            scratch = (len(keys[0]) - 1) * self._block_size
            self._graphs = DecodeGraphs(
                self._decode, self._new_capture, self._device, self._blocks_per_sequence, scratch
            )

    def decode(
        self, batch: StepBatch, rows: SamplingRows
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """A whole step by a graph, results as from `sample`; None if there is none for such a step."""
        if self._graphs is None or not self._graphs.covers(batch):
            return None
        drawn = self._graphs.step(batch, rows, bool(truncates(rows, self._vocab_size).any()))
        return None if drawn is None else _on_host(drawn)

    def hidden(self, batch: StepBatch) -> Tensor:
        arrays = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "places": batch.places,
            "out_rows": batch.out_rows,
        }
        tensors = upload(arrays | self._backend.plan_arrays(batch), self._device)
        assert self._weights is not None
        plan = self._backend.plan_on_device(batch.spans, tensors)
        return self._forward(self._weights, self._keys, self._values, _step_tensors(tensors), plan)

    def sample(self, hidden: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._weights is not None
        on_device = DeviceRows(**upload(row_arrays(rows), self._device))
        return _on_host(self._draw(hidden, on_device, bool(truncates(rows, self._vocab_size).any())))

    def _decode(self, tensors: dict[str, Tensor], any_truncates: bool) -> Tensor:
        """What a graph records: float64 [3, B] from static tensors."""
        assert self._weights is not None
        plan = self._backend.plan_on_device((), tensors)
        hidden = self._forward(self._weights, self._keys, self._values, _step_tensors(tensors), plan)
        return self._draw(hidden, DeviceRows(**{name: tensors[name] for name in ARRAYS}), any_truncates)

    def _draw(self, hidden: Tensor, rows: DeviceRows, any_truncates: bool) -> Tensor:
        assert self._weights is not None
        if any_truncates:
            return draw_on_device(self._decoder.logits(self._weights, hidden), rows, True)
        return draw_whole(F.linear(hidden, self._weights.lm_head), rows, self._logit_softcap)


def _step_tensors(tensors: Mapping[str, Tensor]) -> StepTensors:
    return StepTensors(*(tensors[name] for name in ("token_ids", "positions", "places", "out_rows")))


def _on_host(drawn: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The step's one wait for the device."""
    tokens, log_probs, model_log_probs = drawn.cpu().numpy()
    return tokens.astype(np.int64), log_probs, model_log_probs


def _tensors(weights: ModelWeights) -> Iterator[Tensor]:
    values = [value for part in (weights, *weights.layers) for value in vars(part).values()]
    yield from (value for value in values if isinstance(value, Tensor))
