"""The decoder in plain torch operations, on any device, for devices and dtypes without kernels of ours.

    token ids [T] -> embedding -> layers (norm, attention over the pools, MLP) -> rows that need logits [O]

A batch is packed, with one row per token and no padding. The last tokens of the decoding sequences come
first, then spans of new tokens. With 16-bit weights the residual stream, norms and rotations are float32, as
in training. Numbers are then rounded where training rounds them, and log-probs agree. On CPU, `cpu_model.py`
runs float32 and bfloat16, faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.packing.attention import takes_flash, varlen_attention
from verl.workers.rollout.native.architecture import ModelSpec, ModelWeights
from verl.workers.rollout.native.step_batch import StepBatch
from verl.workers.rollout.sampler import SamplingRows, draw

_MAX_SCORES = 1 << 24  # scores that `masked_attention` computes at a time; it holds four such float32 tensors


@dataclass(frozen=True)
class _AttentionGroup:
    """Sequences that attend in one call of `masked_attention`.

    Attributes:
        rows: Their rows of the batch.
        positions: int64 [B, Q], positions of the queries.
        places: int64 [B, L], places in the pool of the positions that they see.
    """

    rows: slice
    positions: Tensor
    places: Tensor


@dataclass(frozen=True)
class _PackedBatch:
    """All sequences, for `varlen_attention`.

    Attributes:
        cu_seqlens: Running sum of the numbers of queries, from 0.
        cu_key_lens: Running sum of the numbers of keys, from 0.
        longest: The largest number of queries and of keys of a sequence.
        places: int64 [K], places in the pool of the positions that each sequence sees, one sequence after the
            other.
    """

    cu_seqlens: Tensor
    cu_key_lens: Tensor
    longest: tuple[int, int]
    places: Tensor


class TorchModel:
    """The weights (references to the tensors given), pools and one step of the decoder."""

    def __init__(
        self,
        spec: ModelSpec,
        tables: Mapping[str | None, tuple[Tensor, Tensor]],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create a model without weights and pools.

        Args:
            spec: The sizes and choices of the decoder.
            tables: The result of `rotary_tables`.
            block_size: Number of positions of a block.
            dtype: The dtype of the computation and the pools.
            device: The device that the model runs on.
        """
        self._spec = spec
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._tables = {
            kind: (cos.to(device, self._wide), sin.to(device, self._wide))
            for kind, (cos, sin) in tables.items()
        }
        self._block_size = block_size
        self._device = device
        self._activation = F.silu if spec.hidden_act == "silu" else partial(F.gelu, approximate="tanh")
        self._weights: ModelWeights | None = None
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._flash = takes_flash(dtype, spec.head_dim, device)

    def load(self, weights: ModelWeights) -> int:
        """Use these weights where they are. Returns the number of bytes of copies, which is 0."""
        self._weights = weights
        return 0

    def unload(self) -> None:
        """Drop all weights."""
        self._weights = None

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Use these pools [num_blocks, block_size, num_kv_heads, head_dim], one of each per layer."""
        self._pools = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(keys, values, strict=True)]

    def hidden(self, batch: StepBatch) -> Tensor:
        """Run the layers, fill the pools, and return the hidden states of `batch.out_rows`.

        Returns:
            The normed hidden states [O, hidden_size].
        """
        assert self._weights is not None
        token_ids, positions, places, out_rows = (
            torch.from_numpy(array).to(self._device)
            for array in (batch.token_ids, batch.positions, batch.places, batch.out_rows)
        )
        rotations = {
            kind: (cos[positions][:, None], sin[positions][:, None])
            for kind, (cos, sin) in self._tables.items()
        }
        sequences = self._packed(batch) if self._flash else self._sequences(batch)
        x = F.embedding(token_ids, self._weights.embedding).to(self._wide)
        if self._spec.embedding_scale != 1.0:
            x = x * torch.full((), self._spec.embedding_scale, dtype=self._dtype, device=x.device)
        for index, layer in enumerate(self._weights.layers):
            rotation = rotations[self._spec.rope_kinds[index]]
            normed = self._norm(x, layer["input_layernorm.weight"])
            out = self._attention(index, layer, normed, places, rotation, sequences)
            if self._spec.sandwich_norms:
                out = self._norm(out, layer["post_attention_layernorm.weight"])
            x = x + out
            normed = self._norm(x, layer[self._spec.mlp_norm])
            gate = self._activation(_linear(normed, layer, "mlp.gate_proj"))
            out = _linear(gate.mul_(_linear(normed, layer, "mlp.up_proj")), layer, "mlp.down_proj")
            if self._spec.sandwich_norms:
                out = self._norm(out, layer["post_feedforward_layernorm.weight"])
            x = x + out
        return self._norm(x.index_select(0, out_rows), self._weights.norm)

    def sample(self, hidden: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens and both log-probs (see `Sampled`) for hidden states from `hidden`."""
        drawn = torch.stack([x.to(torch.float64) for x in draw(self.logits(hidden), rows)])
        tokens, log_probs, model_log_probs = drawn.cpu().numpy()  # the step's one wait for the device
        return tokens.astype(np.int64), log_probs, model_log_probs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states from `hidden`, in float32."""
        assert self._weights is not None
        return F.linear(hidden, self._weights.lm_head).float()

    def _packed(self, batch: StepBatch) -> _PackedBatch:
        """Describe the batch to flash attention. The places are computed on the device."""
        count = batch.num_decode
        spans = batch.spans
        queries = np.array([1] * count + [span.count for span in spans])
        keys = np.array([*batch.decode_lengths.tolist(), *(span.start + span.count for span in spans)])
        width = max([batch.decode_tables.shape[1] * bool(count), *(len(span.table) for span in spans)])
        tables = np.zeros((len(keys), width), np.int32)
        tables[:count, : batch.decode_tables.shape[1]] = batch.decode_tables
        for row, span in enumerate(spans, count):
            tables[row, : len(span.table)] = span.table
        sums = [np.concatenate(([0], np.cumsum(lengths))) for lengths in (queries, keys)]
        # All numbers are in one array, which takes one copy to the device.
        packed = torch.from_numpy(np.concatenate([*sums, tables.ravel()]).astype(np.int32)).to(self._device)
        cu_seqlens, cu_key_lens = packed[: 2 * len(keys) + 2].view(2, -1)
        total = int(keys.sum())
        rows = torch.arange(len(keys), device=self._device)
        rows = rows.repeat_interleave(cu_key_lens.diff(), output_size=total)
        offsets = torch.arange(total, device=self._device) - cu_key_lens[rows]
        blocks = packed[2 * len(keys) + 2 :].view(tables.shape)[rows, offsets // self._block_size]
        places = blocks.long() * self._block_size + offsets % self._block_size
        return _PackedBatch(cu_seqlens, cu_key_lens, (int(queries.max()), int(keys.max())), places)

    def _sequences(self, batch: StepBatch) -> list[_AttentionGroup]:
        """Return the decoding sequences together, padded to the longest, and then each span alone."""
        calls: list[tuple[slice, np.ndarray, np.ndarray, int]] = []  # rows, positions, tables, seen positions
        if batch.num_decode:
            longest = int(batch.decode_lengths.max())
            positions = batch.decode_lengths[:, None] - 1
            calls.append((slice(0, batch.num_decode), positions, batch.decode_tables, longest))
        for span in batch.spans:
            rows = slice(span.first, span.first + span.count)
            end = span.start + span.count
            calls.append((rows, np.arange(span.start, end)[None], span.table[None], end))
        sequences = []
        for rows, positions, tables, length in calls:
            key_positions = np.arange(length)
            blocks = tables[:, key_positions // self._block_size].astype(np.int64)
            places = torch.from_numpy(blocks * self._block_size + key_positions % self._block_size)
            query_positions = torch.from_numpy(positions).to(self._device)
            sequences.append(_AttentionGroup(rows, query_positions, places.to(self._device)))
        return sequences

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        width = (x.shape[-1],)
        eps = self._spec.rms_norm_eps
        weight = weight.to(self._wide)
        if self._spec.norm_offset:
            weight = 1.0 + weight
        return F.rms_norm(x.to(self._wide), width, weight, eps).to(self._dtype)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm queries or keys. Qwen 3 rounds before it multiplies by the weight, Gemma 3 after."""
        if self._spec.norm_offset:
            return self._norm(x, weight)
        normed = F.rms_norm(x.to(self._wide), (x.shape[-1],), None, self._spec.rms_norm_eps)
        return normed.to(self._dtype) * weight.to(self._wide)

    def _attention(
        self,
        index: int,
        layer: dict[str, Tensor],
        x: Tensor,
        places: Tensor,
        rotation: tuple[Tensor, Tensor],
        sequences: list[_AttentionGroup] | _PackedBatch,
    ) -> Tensor:
        """Put the new keys and values into the pools, and attend: x [T, hidden_size] -> [T, hidden_size]."""
        spec = self._spec
        heads = (x.shape[0], -1, spec.head_dim)
        query, key, value = (_linear(x, layer, f"self_attn.{name}_proj").view(heads) for name in "qkv")
        if spec.qk_norm:
            query = self._head_norm(query, layer["self_attn.q_norm.weight"])
            key = self._head_norm(key, layer["self_attn.k_norm.weight"])
        query, key = (_rotate(x, *rotation).to(self._dtype) for x in (query, key))
        keys, values = self._pools[index]
        keys.index_copy_(0, places, key)
        values.index_copy_(0, places, value)
        window = spec.windows[index]
        if isinstance(sequences, _PackedBatch):
            keys_and_values = keys[sequences.places], values[sequences.places]
            sums = sequences.cu_seqlens, sequences.cu_key_lens
            out = varlen_attention(query, *keys_and_values, *sums, sequences.longest, spec.scale, window)
        else:
            attended = [
                masked_attention(
                    query[group.rows].view(*group.positions.shape, *query.shape[1:]),
                    keys[group.places],
                    values[group.places],
                    group.positions,
                    window,
                    spec.scale,
                ).flatten(0, 1)
                for group in sequences
            ]
            out = torch.cat(attended)
        return _linear(out.flatten(1), layer, "self_attn.o_proj")


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, scale: float
) -> Tensor:
    """Compute attention by the definition, in float32, for a bounded number of scores at a time.

    Args:
        query: [B, Q, num_heads, head_dim].
        keys: [B, L, num_kv_heads, head_dim], positions 0 to L - 1.
        values: [B, L, num_kv_heads, head_dim], positions 0 to L - 1.
        positions: int64 [B, Q] of the queries. Each sees the positions up to its own.
        window: Number of positions that a token sees, itself included (None = all).
        scale: Factor on query-key products.

    Returns:
        A tensor with the shape and dtype of the query.
    """
    batch, count, num_heads, head_dim = query.shape
    max_queries = max(1, _MAX_SCORES // max(1, batch * num_heads * keys.shape[1]))
    if count > max_queries:
        pieces = zip(query.split(max_queries, 1), positions.split(max_queries, 1), strict=True)
        return torch.cat(
            [
                masked_attention(piece, keys, values, piece_positions, window, scale)
                for piece, piece_positions in pieces
            ],
            1,
        )
    grouped = query.float().view(batch, count, keys.shape[2], -1, head_dim)
    scores = torch.einsum("bqkgd,blkd->bqkgl", grouped, keys.float()) * scale
    behind = positions[:, :, None] - torch.arange(keys.shape[1], device=query.device)
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    probs = scores.masked_fill_(~visible[:, :, None, None], float("-inf")).softmax(-1)
    attended = torch.einsum("bqkgl,blkd->bqkgd", probs, values.float())
    return attended.reshape(batch, count, num_heads, head_dim).to(query.dtype)


def _linear(x: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] by cos, sin [T, 1, head_dim // 2] (rotary embedding, Su et al., 2021)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
