"""The decoder in plain torch operations, on any device: what runs where there are no kernels of ours.

    token ids [T] -> embedding -> layers (norm, attention over the pools, MLP) -> rows that need logits [O]

A batch is packed: one row per token, no padding; the decoding sequences' last tokens first, then spans of new
tokens. With 16-bit weights the residual stream, norms and rotations are float32, as in training: numbers are
rounded where it rounds them, and log-probs agree.
On CPU, float32 and bfloat16 have `cpu_model.py`, which is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.packed_attention import takes_flash, varlen_attention
from verl.workers.rollout.native.architecture import ModelSpec, ModelWeights
from verl.workers.rollout.native.step_batch import StepBatch
from verl.workers.rollout.sampler import SamplingRows, draw

_MAX_SCORES = 1 << 24  # of `masked_attention`, which holds four tensors of so many float32


@dataclass(frozen=True)
class _Together:
    """Sequences that attend in one call, by the book: rows, positions int64 [B, Q], places of what they see
    int64 [B, L].
    """

    rows: slice
    positions: Tensor
    places: Tensor


@dataclass(frozen=True)
class _Packed:
    """All sequences for `varlen_attention`; places: int64 [K], of what they see, one after the other."""

    cu_seqlens: Tensor
    cu_key_lens: Tensor
    longest: tuple[int, int]
    places: Tensor


class TorchModel:
    """Weights (references to what it is given), pools and one step of the decoder."""

    def __init__(
        self,
        spec: ModelSpec,
        tables: Mapping[str | None, tuple[Tensor, Tensor]],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """tables: from `rotary_tables`."""
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
        """Use these weights where they are; returns the bytes of copies made: none."""
        self._weights = weights
        return 0

    def unload(self) -> None:
        """Drop all weights."""
        self._weights = None

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Use these pools [num_blocks, block_size, num_kv_heads, head_dim], one of each per layer."""
        self._pools = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(keys, values, strict=True)]

    def hidden(self, batch: StepBatch) -> Tensor:
        """Run the layers and fill the pools; normed hidden states [O, hidden_size] of `batch.out_rows`."""
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
        """Tokens and both log-probs (see `Sampled`) for hidden states from `hidden`."""
        assert self._weights is not None
        logits = F.linear(hidden, self._weights.lm_head).float()
        drawn = torch.stack([x.to(torch.float64) for x in draw(logits, rows)])
        tokens, log_probs, model_log_probs = drawn.cpu().numpy()  # the step's one wait for the device
        return tokens.astype(np.int64), log_probs, model_log_probs

    def _packed(self, batch: StepBatch) -> _Packed:
        """What flash attention is told of the batch; the places are found on the device."""
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
        # one array, one copy to the device
        packed = torch.from_numpy(np.concatenate([*sums, tables.ravel()]).astype(np.int32)).to(self._device)
        cu_seqlens, cu_key_lens = packed[: 2 * len(keys) + 2].view(2, -1)
        total = int(keys.sum())
        rows = torch.arange(len(keys), device=self._device)
        rows = rows.repeat_interleave(cu_key_lens.diff(), output_size=total)
        offsets = torch.arange(total, device=self._device) - cu_key_lens[rows]
        blocks = packed[2 * len(keys) + 2 :].view(tables.shape)[rows, offsets // self._block_size]
        places = blocks.long() * self._block_size + offsets % self._block_size
        return _Packed(cu_seqlens, cu_key_lens, (int(queries.max()), int(keys.max())), places)

    def _sequences(self, batch: StepBatch) -> list[_Together]:
        """The decoding sequences together, padded to the longest; then each span alone."""
        parts: list[tuple[slice, np.ndarray, np.ndarray, int]] = []  # rows, positions, tables, what they see
        if batch.num_decode:
            longest = int(batch.decode_lengths.max())
            positions = batch.decode_lengths[:, None] - 1
            parts.append((slice(0, batch.num_decode), positions, batch.decode_tables, longest))
        for span in batch.spans:
            rows = slice(span.first, span.first + span.count)
            end = span.start + span.count
            parts.append((rows, np.arange(span.start, end)[None], span.table[None], end))
        sequences = []
        for rows, positions, tables, length in parts:
            seen = np.arange(length)
            blocks = tables[:, seen // self._block_size].astype(np.int64)
            places = torch.from_numpy(blocks * self._block_size + seen % self._block_size)
            at = torch.from_numpy(positions).to(self._device)
            sequences.append(_Together(rows, at, places.to(self._device)))
        return sequences

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        width = (x.shape[-1],)
        eps = self._spec.rms_norm_eps
        weight = weight.to(self._wide)
        if self._spec.norm_offset:
            weight = 1.0 + weight
        return F.rms_norm(x.to(self._wide), width, weight, eps).to(self._dtype)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of queries and keys. Qwen 3 rounds before it multiplies by the weight, Gemma 3 after."""
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
        sequences: list[_Together] | _Packed,
    ) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; the new keys and values go into the pools first."""
        spec = self._spec
        heads = (x.shape[0], -1, spec.head_dim)
        query, key, value = (_linear(x, layer, f"self_attn.{name}_proj").view(heads) for name in "qkv")
        if spec.qk_norm:
            query = self._head_norm(query, layer["self_attn.q_norm.weight"])
            key = self._head_norm(key, layer["self_attn.k_norm.weight"])
        query, key = (_turned(x, *rotation).to(self._dtype) for x in (query, key))
        keys, values = self._pools[index]
        keys.index_copy_(0, places, key)
        values.index_copy_(0, places, value)
        window = spec.windows[index]
        if isinstance(sequences, _Packed):
            seen = keys[sequences.places], values[sequences.places]
            sums = sequences.cu_seqlens, sequences.cu_key_lens
            out = varlen_attention(query, *seen, *sums, sequences.longest, spec.scale, window)
        else:
            attended = [
                masked_attention(
                    query[some.rows].view(*some.positions.shape, *query.shape[1:]),
                    keys[some.places],
                    values[some.places],
                    some.positions,
                    window,
                    spec.scale,
                ).flatten(0, 1)
                for some in sequences
            ]
            out = torch.cat(attended)
        return _linear(out.flatten(1), layer, "self_attn.o_proj")


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attention by the book, in float32, for a bounded number of scores at a time.

    query: [B, Q, num_heads, head_dim]. keys, values: [B, L, num_kv_heads, head_dim], positions 0 to L - 1.
    positions: int64 [B, Q] of the queries; each sees the positions up to its own. window: positions that a
    token sees, itself included (None = all). Returns as the query is.
    """
    batch, count, num_heads, head_dim = query.shape
    most = max(1, _MAX_SCORES // max(1, batch * num_heads * keys.shape[1]))
    if count > most:
        pieces = zip(query.split(most, 1), positions.split(most, 1), strict=True)
        return torch.cat(
            [masked_attention(piece, keys, values, at, window, scale) for piece, at in pieces], 1
        )
    grouped = query.float().view(batch, count, keys.shape[2], -1, head_dim)
    scores = torch.einsum("bqkgd,blkd->bqkgl", grouped, keys.float()) * scale
    behind = positions[:, :, None] - torch.arange(keys.shape[1], device=query.device)
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    probs = scores.masked_fill_(~seen[:, :, None, None], float("-inf")).softmax(-1)
    attended = torch.einsum("bqkgl,blkd->bqkgd", probs, values.float())
    return attended.reshape(batch, count, num_heads, head_dim).to(query.dtype)


def _linear(x: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of [T, heads, head_dim]; cos, sin [T, 1, head_dim // 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
