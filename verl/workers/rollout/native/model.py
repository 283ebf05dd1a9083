"""The decoder's forward pass over a packed batch: one row per token, no padding.

    token ids [T] -> embedding -> layers (norm, attention over the slots' cache, MLP) -> rows that need logits

The first rows are the running slots' last tokens (decode), the rest are spans of new tokens (prefill). Keys
and values go into the cache as they are made. Logits are computed for the last token of each sequence only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.attention import (
    DecodeGroup,
    PrefillSpan,
    decode_attention,
    prefill_attention,
)
from verl.workers.rollout.native.kv_cache import KVCache
from verl.workers.rollout.native.weights import LayerWeights, ModelWeights


@dataclass
class PackedBatch:
    """T tokens of one forward pass; the first `num_decode` belong to running slots, then the spans follow.

    Attributes:
        token_ids, positions: int64 [T].
        write_slots, write_positions: int64 [W], where keys and values go; `write_rows` (int64 [W]) are the
            rows that they come from, None when W == T and the order is the same. W > T when several slots
            share a prompt that is computed once.
        decode: how the first `num_decode` rows read the cache.
        spans: the prefill rows, in order.
        out_rows: int64 [O], rows whose logits are wanted (None = all).
    """

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    write_positions: Tensor
    write_rows: Tensor | None
    num_decode: int
    decode: list[DecodeGroup]
    spans: list[PrefillSpan]
    out_rows: Tensor | None


class Decoder:
    """The architecture without its weights: those are passed to each call."""

    def __init__(self, spec: ModelSpec, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: from `rotary_table`."""
        self._spec = spec
        self._cos = cos
        self._sin = sin
        self._act: Callable[[Tensor], Tensor] = (
            F.silu if spec.hidden_act == "silu" else ACT2FN[spec.hidden_act]
        )

    def hidden_states(self, weights: ModelWeights, cache: KVCache, batch: PackedBatch) -> Tensor:
        """Run the layers, fill the cache; returns normed hidden states [O, hidden_size] of `out_rows`."""
        cos = self._cos[batch.positions][:, None]
        sin = self._sin[batch.positions][:, None]
        x = F.embedding(batch.token_ids, weights.embedding)
        eps, width = self._spec.rms_norm_eps, (self._spec.hidden_size,)
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(x, width, layer.input_norm, eps)
            x = x + self._attention(index, layer, cache, batch, normed, cos, sin)
            normed = F.rms_norm(x, width, layer.post_norm, eps)
            gate = self._act(F.linear(normed, layer.gate, layer.gate_bias))
            gate = gate.mul_(F.linear(normed, layer.up, layer.up_bias))
            x = x + F.linear(gate, layer.down, layer.down_bias)
        if batch.out_rows is not None:
            x = x.index_select(0, batch.out_rows)
        return F.rms_norm(x, width, weights.norm, eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        cache: KVCache,
        batch: PackedBatch,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        spec = self._spec
        heads = (x.shape[0], -1, spec.head_dim)
        query = F.linear(x, layer.q, layer.q_bias).view(heads)
        key = F.linear(x, layer.k, layer.k_bias).view(heads)
        value = F.linear(x, layer.v, layer.v_bias).view(heads)
        if layer.q_norm is not None:
            query = F.rms_norm(query, (spec.head_dim,), layer.q_norm, spec.rms_norm_eps)
            key = F.rms_norm(key, (spec.head_dim,), layer.k_norm, spec.rms_norm_eps)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)

        keys, values = cache.keys[index], cache.values[index]
        new_keys, new_values = key, value
        if batch.write_rows is not None:
            new_keys, new_values = key[batch.write_rows], value[batch.write_rows]
        keys[batch.write_slots, :, batch.write_positions] = new_keys
        values[batch.write_slots, :, batch.write_positions] = new_values

        window = spec.windows[index]
        parts = [prefill_attention(query, key, value, keys, values, span, window) for span in batch.spans]
        if batch.num_decode:
            parts.insert(0, decode_attention(query[: batch.num_decode], keys, values, batch.decode, window))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return F.linear(attended, layer.o, layer.o_bias)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of [T, heads, head_dim]; sin carries the swapped halves' sign."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)
