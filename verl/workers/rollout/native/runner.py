"""Weights, paged KV pools and sampling on one device: the model's side of `step_batch.py`.

    StepBatch (numpy) -> DeviceModel: hidden states over the pools -> logits -> tokens -> Sampled (numpy)

On CPU in float32 and bfloat16 the model is `CpuModel` (packed matrices, compiled kernels), on CUDA
`CudaModel` (decode steps as graphs), else `TorchModel` (torch operations on the owner's own tensors). That is
the only choice made here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.workers.rollout.native.architecture import ModelSpec, rotary_tables, text_weights
from verl.workers.rollout.native.attention import TorchAttention
from verl.workers.rollout.native.cpu_model import DTYPES, CpuModel
from verl.workers.rollout.native.model import TorchModel
from verl.workers.rollout.native.sampler import SamplingRows
from verl.workers.rollout.native.step_batch import Sampled, StepBatch
from verl.workers.rollout.native.weights import ModelWeights, WeightStore

if TYPE_CHECKING:
    from verl.workers.rollout.native.cuda.model import CudaModel

logger = logging.getLogger(__name__)
_MAX_LOGITS = 1 << 26  # elements of logits held at once; more rows are sampled in pieces


Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids int64 [O] and both float64 [O] log-probs (see `Sampled`)."""


class DeviceModel(Protocol):
    """A decoder with its weights on one kind of device, over pools that the runner owns."""

    def load(self, weights: ModelWeights) -> int:
        """Take a set of weights; returns the bytes of copies made."""

    def unload(self) -> None:
        """Drop all weights."""

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Use these pools, one of each per layer; none at all to let go of them."""

    def hidden(self, batch: StepBatch) -> Tensor:
        """Run the layers and fill the pools; normed hidden states [O, hidden_size] of `batch.out_rows`."""

    def sample(self, hidden: Tensor, rows: SamplingRows) -> Drawn:
        """Token ids and log-probs for hidden states."""


class PagedRunner:
    """`ModelRunner` for Qwen2, Qwen3, Llama, Mistral, Gemma 2 and Gemma 3.

    Attributes:
        spec: what was read from the config.
        vocab_size, block_size: of the model and of the pool.
        bytes_per_block: keys and values of one block in all layers.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_size: int = 32,
        max_model_len: int = 2048,
        enforce_eager: bool = False,
        compile: bool = False,
        copies_weights: bool = False,
    ) -> None:
        """ValueError for an architecture that it does not run.

        Args:
            max_model_len: positions 0 to one less.
            enforce_eager: on CUDA, no graphs; compile: on CUDA, torch.compile the decoder; copies_weights:
                on CUDA, the weights that it gets are made for each update (see `WeightStore`).
        """
        self.device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0", as tensors name it
        self.spec = ModelSpec.from_config(model_config)
        self.vocab_size = self.spec.vocab_size
        self.block_size = block_size
        self._dtype = dtype
        self._is_multimodal = model_config.model_type == "gemma3"
        self._pool_shape = (block_size, self.spec.num_kv_heads, self.spec.head_dim)
        self.bytes_per_block = 2 * self.spec.num_layers * int(np.prod(self._pool_shape)) * dtype.itemsize
        tables = rotary_tables(model_config, self.spec, max_model_len)
        self._model: DeviceModel
        self._cuda: CudaModel | None = None
        if self.device.type == "cpu" and dtype in DTYPES:
            self._model = CpuModel(self.spec, tables, block_size)
        elif self.device.type == "cuda":
            from verl.workers.rollout.native.cuda.model import CudaModel  # needs Triton

            self._model = self._cuda = CudaModel(
                self.spec, tables, dtype, self.device, block_size, max_model_len, not enforce_eager, compile
            )
        else:
            logger.warning("rollouts in %s on %s take the general path, which is slow", dtype, self.device)
            backend = TorchAttention(block_size, self.device)
            self._model = TorchModel(self.spec, tables, dtype, self.device, backend)
        copies = copies_weights and self._cuda is not None  # on CPU they are packed into copies anyway
        self._store = WeightStore(self.spec, dtype, self.device, copies)
        self._has_weights = False
        self._own_bytes = 0  # of weights, beyond the owner's
        self._said_bytes = False
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def allocate(self, num_blocks: int) -> None:
        """Make the pools (what was in them is gone). On CPU memory is touched when it is used."""
        shape = (num_blocks + (self._cuda is not None), *self._pool_shape)  # CUDA: one for padding
        self._keys, self._values = (
            [torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(self.spec.num_layers)]
            for _ in range(2)
        )
        self._model.attach(self._keys, self._values)

    def release_cache(self) -> None:
        """Give the pools' memory back; `allocate` comes before the next step."""
        self._keys, self._values = [], []
        self._model.attach([], [])
        self._return_memory()

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks within the pools, in all layers. No block is both source and target."""
        pairs = torch.tensor([list(sources), list(targets)], pin_memory=self.device.type == "cuda")
        source, target = pairs.to(self.device, non_blocking=True)
        for pool in (*self._keys, *self._values):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole set of parameters, as (Hugging Face name, full tensor).

        ValueError for unknown, missing or wrongly shaped ones; there are no weights then until the next call.
        `lm_head.weight` may be left out when embeddings are tied.
        """
        self._has_weights = False
        if self._is_multimodal:
            weights = text_weights(weights)
        self._model.unload()  # the store keeps its casts: they are overwritten where they are
        self._own_bytes = self._model.load(self._store.update(weights))
        if isinstance(self._model, CpuModel):
            self._store.clear()  # it has packed copies of its own
            if not self._said_bytes:
                logger.info("rollouts hold %.2f GiB of packed weights", self._own_bytes / (1 << 30))
            self._said_bytes = True
        else:
            self._own_bytes += self._store.num_bytes
        self._has_weights = True

    def release_weights(self) -> int:
        """Drop every reference to weights; returns the bytes of those that were the runner's own."""
        freed, self._own_bytes, self._has_weights = self._own_bytes, 0, False
        self._model.unload()
        self._store.clear()
        self._return_memory()
        return freed

    def _return_memory(self) -> None:
        """What torch keeps for later allocations goes back to the device, for whoever shares it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self, batch: StepBatch, rows: SamplingRows) -> Sampled:
        """Run the model, fill the pools, sample. RuntimeError: no weights, or log-probs not finite."""
        if not self._has_weights:
            raise RuntimeError("the model has no weights; call update_weights first")
        drawn = self._cuda.decode(batch, rows) if self._cuda is not None else None
        tokens, log_probs, model_log_probs = drawn or self._in_pieces(batch, rows)
        if not (np.isfinite(log_probs).all() and np.isfinite(model_log_probs).all()):
            raise RuntimeError(
                "sampling met a log-prob that is not finite: the weights hold or produce NaN or infinity"
            )
        return Sampled(tokens, log_probs, model_log_probs)

    def _in_pieces(self, batch: StepBatch, rows: SamplingRows) -> Drawn:
        hidden = self._model.hidden(batch)
        count, most = len(batch.out_rows), max(1, _MAX_LOGITS // self.vocab_size)
        parts = [
            self._model.sample(hidden[first : first + most], rows[first : first + most])
            for first in range(0, count, most)
        ]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        tokens, log_probs, model_log_probs = (np.concatenate(part) for part in zip(*parts, strict=True))
        return tokens, log_probs, model_log_probs
