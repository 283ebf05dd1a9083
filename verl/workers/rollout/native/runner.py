"""Weights, paged KV pools and sampling on one device: the model's side of `step_batch.py`.

    StepBatch (numpy) -> device tensors -> PagedDecoder over the pools -> logits -> draw -> Sampled (numpy)

One transfer to the device per step and one back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.workers.rollout.native.architecture import ModelSpec, rotary_tables
from verl.workers.rollout.native.attention import TorchAttention
from verl.workers.rollout.native.model import PagedDecoder, StepTensors
from verl.workers.rollout.native.sampler import SamplingRows, draw
from verl.workers.rollout.native.step_batch import Sampled, StepBatch
from verl.workers.rollout.native.weights import ModelWeights, WeightStore

_MAX_LOGITS = 1 << 27  # elements of logits held at once; more rows are sampled in pieces


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
    ) -> None:
        """ValueError for an architecture that it does not run. max_model_len: positions 0 to one less."""
        self.device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0", as tensors name it
        self.spec = ModelSpec.from_config(model_config)
        self.vocab_size = self.spec.vocab_size
        self.block_size = block_size
        self._dtype = dtype
        self._pool_shape = (block_size, self.spec.num_kv_heads, self.spec.head_dim)
        self.bytes_per_block = 2 * self.spec.num_layers * int(np.prod(self._pool_shape)) * dtype.itemsize
        tables = rotary_tables(model_config, self.spec, max_model_len)
        on_device = {
            kind: (cos.to(self.device, dtype), sin.to(self.device, dtype))
            for kind, (cos, sin) in tables.items()
        }
        self._backend = TorchAttention(block_size, self.device)
        self._decoder = PagedDecoder(self.spec, on_device, self._backend)
        self._store = WeightStore(self.spec, dtype, self.device)
        self._weights: ModelWeights | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def allocate(self, num_blocks: int) -> None:
        """Make the pools (what was in them is gone). On CPU memory is touched when it is used."""
        shape = (num_blocks, *self._pool_shape)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(self.spec.num_layers)]
            for _ in range(2)
        )

    def release_cache(self) -> None:
        """Give the pools' memory back; `allocate` comes before the next step."""
        self._keys, self._values = [], []

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks within the pools, in all layers. No block is both source and target."""
        source, target = (torch.tensor(list(x), device=self.device) for x in (sources, targets))
        for pool in (*self._keys, *self._values):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole set of parameters, as (Hugging Face name, full tensor).

        ValueError for unknown, missing or wrongly shaped ones; there are no weights then until the next call.
        `lm_head.weight` may be left out when embeddings are tied.
        """
        self._weights = None
        self._weights = self._store.update(weights)

    def release_weights(self) -> int:
        """Drop every reference to weights; returns the bytes of those that were the runner's own."""
        self._weights = None
        return self._store.clear()

    @torch.inference_mode()
    def step(self, batch: StepBatch, rows: SamplingRows) -> Sampled:
        """Run the model, fill the pools, sample. RuntimeError: no weights, or log-probs not finite."""
        if self._weights is None:
            raise RuntimeError("the model has no weights; call update_weights first")
        tensors = StepTensors(
            *(
                torch.from_numpy(array).to(self.device)
                for array in (batch.token_ids, batch.positions, batch.places, batch.out_rows)
            )
        )
        plan = self._backend.plan(batch)
        hidden = self._decoder.forward(self._weights, self._keys, self._values, tensors, plan)
        most = max(1, _MAX_LOGITS // self.vocab_size)
        parts = []
        for first in range(0, len(batch.out_rows), most):
            part = slice(first, first + most)
            logits = self._decoder.logits(self._weights, hidden[part])
            parts.append(torch.stack([x.to(torch.float64) for x in draw(logits, rows[part])]))
        if not parts:
            return Sampled(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        tokens, log_probs, model_log_probs = torch.cat(parts, 1).cpu().numpy()
        if not (np.isfinite(log_probs).all() and np.isfinite(model_log_probs).all()):
            raise RuntimeError(
                "sampling met a log-prob that is not finite: the weights hold or produce NaN or infinity"
            )
        return Sampled(tokens.astype(np.int64), log_probs, model_log_probs)
