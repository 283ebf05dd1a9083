"""`PagedDecoder` for CUDA: the same layers with everything between the matrix products fused.

Per layer: seven matrix products, attention, two norms (each with the addition before it), one kernel that
norms, rotates and stores the heads, one for the MLP's activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.attention import AttentionBackend
from verl.workers.rollout.native.cuda.attention import CudaPlan
from verl.workers.rollout.native.cuda.triton_layers import add_norm, gate_up, rotate_and_store
from verl.workers.rollout.native.model import StepTensors
from verl.workers.rollout.native.weights import LayerWeights, ModelWeights


class FusedDecoder:
    """Tensors in, tensors out, as `PagedDecoder.forward`."""

    def __init__(
        self, spec: ModelSpec, tables: Mapping[str | None, tuple[Tensor, Tensor]], backend: AttentionBackend
    ) -> None:
        """tables: from `rotary_tables`, in the dtype and on the device of the model."""
        self._spec = spec
        self._tables = {kind: (cos.contiguous(), sin.contiguous()) for kind, (cos, sin) in tables.items()}
        self._backend = backend

    def forward(
        self,
        weights: ModelWeights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        step: StepTensors,
        plan: CudaPlan,
    ) -> Tensor:
        """See `PagedDecoder.forward`."""
        spec = self._spec
        x = F.embedding(step.token_ids, weights.embedding)
        if spec.embedding_scale != 1.0:
            x = x * torch.full((), spec.embedding_scale, dtype=x.dtype, device=x.device)
        out: Tensor | None = None
        out_norm: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            normed = self._add_norm(x, out, out_norm, layer.attn_norm)
            out = self._attention(index, layer, (keys[index], values[index]), step, plan, normed)
            normed = self._add_norm(x, out, layer.attn_out_norm, layer.mlp_norm)
            gate = F.linear(normed, layer.gate, layer.gate_bias)
            up = F.linear(normed, layer.up, layer.up_bias)
            out = F.linear(gate_up(gate, up, spec.hidden_act == "silu"), layer.down, layer.down_bias)
            out_norm = layer.mlp_out_norm
        return self._add_norm(x, out, out_norm, weights.norm).index_select(0, step.out_rows)

    def _add_norm(self, x: Tensor, out: Tensor | None, out_norm: Tensor | None, weight: Tensor) -> Tensor:
        return add_norm(x, out, out_norm, weight, self._spec.rms_norm_eps, self._spec.norm_offset)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        pools: tuple[Tensor, Tensor],
        step: StepTensors,
        plan: CudaPlan,
        x: Tensor,
    ) -> Tensor:
        spec = self._spec
        heads = (x.shape[0], -1, spec.head_dim)
        query = F.linear(x, layer.q, layer.q_bias).view(heads)
        key = F.linear(x, layer.k, layer.k_bias).view(heads)
        value = F.linear(x, layer.v, layer.v_bias).view(heads)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        rotation = self._tables[spec.rope_kinds[index]]
        rotate_and_store(
            query,
            key,
            value,
            norms,
            rotation,
            step.positions,
            step.places,
            pools,
            spec.rms_norm_eps,
            spec.norm_offset,
        )
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
