"""Weights, paged KV pools and sampling on one device: the model's side of `step_batch.py`.

    StepBatch (numpy) -> model: hidden states over the pools -> logits -> tokens -> Sampled (numpy)

On CPU in float32 and bfloat16 the model is `CpuModel` (packed matrices, compiled kernels). Elsewhere it is
`TorchModel` (torch operations on the owner's own tensors). That is the only choice made here.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.sessions.engine_contract import Scores
from verl.workers.rollout.native.architecture import ModelSpec, collect_weights, rotary_tables, text_weights
from verl.workers.rollout.native.cpu_model import DTYPES, CpuModel
from verl.workers.rollout.native.step_batch import PrefillSpan, Sampled, StepBatch
from verl.workers.rollout.native.torch_model import TorchModel
from verl.workers.rollout.sampler import MAX_LOGITS, SamplingRows

logger = logging.getLogger(__name__)


class PagedRunner:
    """The model of a `NativeEngine`: Qwen2, Qwen3, Llama, Mistral and Gemma 3. It knows no sessions.

    Attributes:
        device: The device that the model runs on.
        spec: The sizes and choices that were read from the config.
        vocab_size: The size of the vocabulary.
        block_size: Number of positions of a block.
        bytes_per_block: Number of bytes of the keys and values of one block in all layers.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_size: int = 32,
        max_model_len: int = 2048,
    ) -> None:
        """Create a runner without weights and pools.

        Positions go from 0 to max_model_len - 1. Raises ValueError for an architecture that the runner does
        not run.
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
        self._model: CpuModel | TorchModel
        if self.device.type == "cpu" and dtype in DTYPES:
            self._model = CpuModel(self.spec, tables, block_size)
        else:
            remedy = "; install vLLM for fast ones" if self.device.type == "cuda" else ""
            logger.warning(
                "rollouts in %s on %s run in plain torch operations, slowly%s", dtype, self.device, remedy
            )
            self._model = TorchModel(self.spec, tables, block_size, dtype, self.device)
        self._has_weights = False
        self._own_bytes = 0  # bytes of weights that are not the owner's
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def allocate(self, num_blocks: int) -> None:
        """Make the pools, all zeros. The contents of older pools are gone.

        On CPU memory is only touched when it is used.
        """
        shape = (num_blocks, *self._pool_shape)

        def pool() -> Tensor:
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self._dtype, device=self.device)
            # The kernel hands out such memory page by page, full of zeros. torch would write all zeros now.
            num_bytes = int(np.prod(shape)) * self._dtype.itemsize
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(memory, dtype=self._dtype).view(shape)

        self._keys, self._values = ([pool() for _ in range(self.spec.num_layers)] for _ in range(2))
        self._model.attach(self._keys, self._values)

    def release_cache(self) -> None:
        """Give the pools' memory back. `allocate` must come before the next step."""
        self._keys = []
        self._values = []
        self._model.attach([], [])
        self._return_memory()

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks within the pools, in all layers. No block is both source and target."""
        source, target = torch.tensor([list(sources), list(targets)], device=self.device)
        for pool in (*self._keys, *self._values):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the whole model's weights, as `RolloutEngine.load_weights` does."""
        is_first = not self._own_bytes
        self._has_weights = False
        if self._is_multimodal:
            weights = text_weights(weights)
        self._model.unload()
        collected, cast_bytes = collect_weights(self.spec, weights, self._dtype, self.device)
        self._own_bytes = self._model.load(collected)
        if not isinstance(self._model, CpuModel):
            self._own_bytes += cast_bytes
        elif is_first:
            logger.info("rollouts hold %.2f GiB of packed weights", self._own_bytes / (1 << 30))
        self._has_weights = True

    def release_weights(self) -> int:
        """Drop every reference to weights.

        Returns the number of bytes of those that were the runner's own.
        """
        freed = self._own_bytes
        self._own_bytes = 0
        self._has_weights = False
        self._model.unload()
        self._return_memory()
        return freed

    def _return_memory(self) -> None:
        """Return the memory that torch keeps for later allocations to the device, for whoever shares it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self, batch: StepBatch, rows: SamplingRows) -> Sampled:
        """Run the model, fill the pools and sample.

        Args:
            batch: The tokens of the step.
            rows: The sampling choices of the O entries of `batch.out_rows`, in their order.

        Raises:
            RuntimeError: If there are no weights, or log-probs are not finite.
        """
        if not self._has_weights:
            raise RuntimeError("the model has no weights; call load_weights first")
        hidden = self._model.hidden(batch)
        max_rows = max(1, MAX_LOGITS // self.vocab_size)
        pieces = [
            self._model.sample(hidden[first : first + max_rows], rows[first : first + max_rows])
            for first in range(0, len(batch.out_rows), max_rows)
        ]
        if not pieces:
            return Sampled(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        tokens, log_probs, model_log_probs = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if not (np.isfinite(log_probs).all() and np.isfinite(model_log_probs).all()):
            raise RuntimeError(
                "sampling met a log-prob that is not finite: the weights hold or produce NaN or infinity"
            )
        return Sampled(tokens, log_probs, model_log_probs)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], num_most_probable: int) -> Scores:
        """Return the log-probs of a text's tokens, as `RolloutEngine.score` does.

        One pass over the whole text, in pools of its own. Raises RuntimeError if there are no weights.
        """
        if not self._has_weights:
            raise RuntimeError("the model has no weights; call load_weights first")
        number = len(token_ids) - 1
        if number == 0:
            return Scores([], [])
        positions = np.arange(number)
        blocks = np.arange(-(-number // self.block_size), dtype=np.int32)
        batch = StepBatch(
            token_ids=np.array(token_ids[:-1], dtype=np.int64),
            positions=positions,
            places=positions,
            num_decode=0,
            decode_tables=np.zeros((0, 0), np.int32),
            decode_lengths=np.zeros(0, np.int64),
            spans=[PrefillSpan(0, number, 0, blocks)],
            out_rows=positions,
        )
        shape = (len(blocks), *self._pool_shape)
        keys, values = (
            [torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(self.spec.num_layers)]
            for _ in range(2)
        )
        self._model.attach(keys, values)
        try:
            hidden = self._model.hidden(batch)
        finally:
            self._model.attach(self._keys, self._values)
        targets = torch.tensor(list(token_ids[1:]), device=self.device)
        max_rows = max(1, MAX_LOGITS // self.vocab_size)
        scores = Scores([], [])
        for first in range(0, number, max_rows):
            log_probs_RV = self._model.logits(hidden[first : first + max_rows]).float().log_softmax(-1)
            chosen = log_probs_RV.gather(1, targets[first : first + max_rows, None])[:, 0]
            scores.log_probs.extend(chosen.tolist())
            best, ids = log_probs_RV.topk(min(num_most_probable, self.vocab_size))
            for row in zip(ids.tolist(), best.tolist(), strict=True):
                scores.most_probable.append(list(zip(*row, strict=True)))
        return scores
