"""The decoder's forward pass in torch operations over a packed batch: one row per token, no padding.

    token ids [T] -> embedding -> layers (norm, attention over the pools, MLP) -> rows that need logits [O]

The first rows are the decoding sequences' last tokens, the rest are spans of new tokens. Keys and values go
into the pools as they are made. This is the general path: CPU has `cpu_model.py` for its two dtypes, CUDA has
`cuda/decoder.py`, which runs these layers with fewer kernels (torch.compile takes this one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.attention import AttentionBackend, capped
from verl.workers.rollout.native.sampler import SamplingRows, draw
from verl.workers.rollout.native.step_batch import StepBatch
from verl.workers.rollout.native.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class StepTensors:
    """A `StepBatch`'s arrays on the device, int64: token_ids, positions, places [T]; out_rows [O]."""

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    out_rows: Tensor


class PagedDecoder:
    """The architecture in torch operations, without its weights: those are passed to each call.

    Takes and gives tensors only, so that a step of fixed shape can be captured in a CUDA graph.
    """

    def __init__(
        self, spec: ModelSpec, tables: Mapping[str | None, tuple[Tensor, Tensor]], backend: AttentionBackend
    ) -> None:
        """tables: from `rotary_tables`, in the dtype and on the device of the model."""
        self._spec = spec
        self._tables = tables
        self._backend = backend
        self._act: Callable[[Tensor], Tensor] = (
            F.silu if spec.hidden_act == "silu" else partial(F.gelu, approximate="tanh")
        )

    def forward(
        self,
        weights: ModelWeights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        step: StepTensors,
        plan: Any,
    ) -> Tensor:
        """Run the layers and fill the pools.

        Args:
            keys, values: per layer [num_blocks, block_size, num_kv_heads, head_dim].
            plan: the backend's, for the same step.

        Returns:
            normed hidden states [O, hidden_size] of `step.out_rows`
        """
        rotations = {
            kind: (cos[step.positions][:, None], sin[step.positions][:, None])
            for kind, (cos, sin) in self._tables.items()
        }
        x = F.embedding(step.token_ids, weights.embedding)
        if self._spec.embedding_scale != 1.0:
            x = x * torch.full((), self._spec.embedding_scale, dtype=x.dtype, device=x.device)
        for index, layer in enumerate(weights.layers):
            rotation = rotations[self._spec.rope_kinds[index]]
            pools = keys[index], values[index]
            out = self._attention(index, layer, pools, step, plan, self._norm(x, layer.attn_norm), rotation)
            x = x + (out if layer.attn_out_norm is None else self._norm(out, layer.attn_out_norm))
            normed = self._norm(x, layer.mlp_norm)
            gate = self._act(F.linear(normed, layer.gate, layer.gate_bias))
            out = F.linear(gate.mul_(F.linear(normed, layer.up, layer.up_bias)), layer.down, layer.down_bias)
            x = x + (out if layer.mlp_out_norm is None else self._norm(out, layer.mlp_out_norm))
        return self._norm(x.index_select(0, step.out_rows), weights.norm)

    def logits(self, weights: ModelWeights, hidden: Tensor) -> Tensor:
        """float32 [O, vocab_size] for hidden states from `forward`."""
        return capped(F.linear(hidden, weights.lm_head).float(), self._spec.logit_softcap)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        width, eps = (x.shape[-1],), self._spec.rms_norm_eps
        if self._spec.norm_offset:  # in float32, as the reference does: 1 + w loses w's digits in bfloat16
            return F.rms_norm(x.float(), width, 1.0 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, width, weight, eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        pools: tuple[Tensor, Tensor],
        step: StepTensors,
        plan: Any,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        spec = self._spec
        heads = (x.shape[0], -1, spec.head_dim)
        query = F.linear(x, layer.q, layer.q_bias).view(heads)
        key = F.linear(x, layer.k, layer.k_bias).view(heads)
        value = F.linear(x, layer.v, layer.v_bias).view(heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        query, key = _turned(query, *rotation), _turned(key, *rotation)
        for pool, new in zip(pools, (key, value), strict=True):
            pool.flatten(0, 1).index_copy_(0, step.places, new)
        attended = self._backend.attend(
            query,
            key,
            value,
            *pools,
            plan,
            window=spec.windows[index],
            softcap=spec.softcap,
            scale=spec.scale,
        )
        return F.linear(attended, layer.o, layer.o_bias)


class TorchModel:
    """`PagedDecoder` with its weights (references to what it is given) and pools, on any device."""

    def __init__(
        self,
        spec: ModelSpec,
        tables: Mapping[str | None, tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        """tables: from `rotary_tables`."""
        on_device = {
            kind: (cos.to(device, dtype), sin.to(device, dtype)) for kind, (cos, sin) in tables.items()
        }
        self._decoder = PagedDecoder(spec, on_device, backend)
        self._device = device
        self._backend = backend
        self._weights: ModelWeights | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def load(self, weights: ModelWeights) -> int:
        self._weights = weights
        return 0

    def unload(self) -> None:
        self._weights = None

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self._keys, self._values = keys, values

    def hidden(self, batch: StepBatch) -> Tensor:
        assert self._weights is not None
        arrays = (batch.token_ids, batch.positions, batch.places, batch.out_rows)
        step = StepTensors(*(torch.from_numpy(array).to(self._device) for array in arrays))
        plan = self._backend.plan(batch)
        return self._decoder.forward(self._weights, self._keys, self._values, step, plan)

    def sample(self, hidden: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._weights is not None
        drawn = draw(self._decoder.logits(self._weights, hidden), rows)
        tokens, *log_probs = torch.stack([x.to(torch.float64) for x in drawn]).cpu().numpy()  # one transfer
        return tokens.astype(np.int64), log_probs[0], log_probs[1]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of [T, heads, head_dim]; cos, sin [T, 1, head_dim // 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
