"""The decoder on CPU: packed matrices for oneDNN, and one compiled kernel between two of them.

    x += delta, norm | qkv product | norm heads, rotate, keep in the pool | attend | output product
    x += delta, norm | gate and up product | activation | down product            (then the next layer)

The residual stream x is float32 in both dtypes. oneDNN compiles a product for each number of rows that it
meets (0.3 to 2 ms), so rows are padded to few different numbers. Weights are packed once per update: q, k and
v in one matrix, gate and up in one, each in the blocked layout of oneDNN's products. The packed copies are
snapshots. What the owner does to its parameters shows with the next update.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.packing.attention import causal_attention, is_worth_it
from verl.workers.rollout.native import cpu_kernel, cpu_sampler
from verl.workers.rollout.native.architecture import ModelSpec, ModelWeights
from verl.workers.rollout.native.cpu_kernel import as_array, share_rows
from verl.workers.rollout.native.step_batch import PrefillSpan, StepBatch
from verl.workers.rollout.sampler import SamplingRows

logger = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16)
_TYPICAL_ROWS = 64  # oneDNN chooses the layout for this many rows, and runs any number
# Up to the first number of rows, rows are padded to a multiple of the second number.
_STEPS = ((64, 4), (128, 8), (256, 16), (1024, 64))
_LARGE_STEP = 256


def padded(num_rows: int) -> int:
    """Return the number of rows that products run with, of which there are 72 different ones up to 8,192."""
    step = next((step for max_rows, step in _STEPS if num_rows <= max_rows), _LARGE_STEP)
    return -(-num_rows // step) * step


class Product:
    """The product x [T, in] -> x @ weight.T + bias [T, out].

    The weight is copied and, where oneDNN can, packed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = None if bias is None else bias.clone()
        self._packed = can_pack(weight.dtype)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        else:
            self._weight = weight.clone(memory_format=torch.contiguous_format)
        self.num_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return True if this build of torch and this processor have oneDNN's products for the dtype."""
    available = torch.backends.mkldnn.is_available() and (
        dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not available:
        logger.warning("rollouts in %s run without packed matrices, slower: oneDNN does not have them", dtype)
    return available


@dataclass(frozen=True)
class PackedLayer:
    """One layer as the kernels take it.

    Norms are float32 arrays, empty where the model has none.
    """

    attn_norm: np.ndarray
    attn_out_norm: np.ndarray
    mlp_norm: np.ndarray
    mlp_out_norm: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    qkv: Product
    o: Product
    gate_up: Product
    down: Product


class CpuModel:
    """The forward pass and sampling over paged pools on CPU, in float32 or bfloat16."""

    def __init__(
        self, spec: ModelSpec, tables: dict[str | None, tuple[Tensor, Tensor]], block_size: int
    ) -> None:
        """Create a model without weights and pools.

        Args:
            spec: The sizes and choices of the decoder.
            tables: The result of `rotary_tables`.
            block_size: Number of positions of a block.
        """
        self._spec = spec
        self._tables = {kind: (cos.numpy(), sin.numpy()) for kind, (cos, sin) in tables.items()}
        self._block_size = block_size
        self._eps = np.float32(spec.rms_norm_eps)
        self._scale = np.float32(spec.scale)
        self._activation = cpu_kernel.ACTIVATION_CODES[spec.hidden_act]
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._layers: list[PackedLayer] = []

    # ---- weights and pools ----

    def load(self, weights: ModelWeights) -> int:
        """Pack a set of weights, whose list of layers is emptied.

        Returns the number of bytes of the copies.
        """
        self._embedding = weights.embedding.clone()
        # The reference rounds the factor to the dtype of the embeddings.
        self._embedding_scale = np.float32(
            torch.tensor(self._spec.embedding_scale, dtype=weights.embedding.dtype).item()
        )
        self._final_norm = self._norm_weight(weights.norm)
        self._head: Product | None = Product(weights.lm_head, None)
        weights.layers.reverse()
        while weights.layers:  # a layer that was gathered or cast for this is freed once it is packed
            self._layers.append(self._packed(weights.layers.pop()))
        products = [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return self._embedding.nbytes + sum(product.num_bytes for product in products) + self._head.num_bytes

    def unload(self) -> None:
        """Drop all weights."""
        self._layers = []
        self._embedding = torch.empty(0)
        self._head = None

    def attach(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Use these pools [num_blocks, block_size, num_kv_heads, head_dim], one of each per layer."""
        self._pools = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(keys, values, strict=True)]

    def _packed(self, layer: dict[str, Tensor]) -> PackedLayer:
        after_attention = "post_attention_layernorm.weight" if self._spec.sandwich_norms else ""
        return PackedLayer(
            attn_norm=self._norm_weight(layer["input_layernorm.weight"]),
            attn_out_norm=self._norm_weight(layer.get(after_attention)),
            mlp_norm=self._norm_weight(layer[self._spec.mlp_norm]),
            mlp_out_norm=self._norm_weight(layer.get("post_feedforward_layernorm.weight")),
            q_norm=self._norm_weight(layer.get("self_attn.q_norm.weight")),
            k_norm=self._norm_weight(layer.get("self_attn.k_norm.weight")),
            qkv=_joined(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=_joined(layer, "self_attn.o_proj"),
            gate_up=_joined(layer, "mlp.gate_proj", "mlp.up_proj"),
            down=_joined(layer, "mlp.down_proj"),
        )

    def _norm_weight(self, weight: Tensor | None) -> np.ndarray:
        if weight is None:
            return np.zeros(0, dtype=np.float32)
        return (weight.detach().float() + (1.0 if self._spec.norm_offset else 0.0)).numpy()

    # ---- one step ----

    def hidden(self, batch: StepBatch) -> Tensor:
        """Run the layers, fill the pools, and return the hidden states of `batch.out_rows`.

        Returns:
            The normed hidden states [O, hidden_size].
        """
        spec = self._spec
        num_rows = len(batch.token_ids)
        dtype = self._embedding.dtype
        x = np.empty((num_rows, spec.hidden_size), dtype=np.float32)
        normed = _with_padding(num_rows, spec.hidden_size, dtype)
        embedding = as_array(self._embedding)
        share_rows(cpu_kernel.embed, num_rows, batch.token_ids, embedding, self._embedding_scale, x)
        share_rows(cpu_kernel.norm, num_rows, x, self._layers[0].attn_norm, self._eps, as_array(normed))
        last_layer = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, layer.qkv(normed), batch)
            if index == last_layer and (batch.spans or len(batch.out_rows) < num_rows):
                # The remaining operations matter only for the rows that are sampled from.
                if not len(batch.out_rows):  # oneDNN does not take 0 rows
                    return torch.empty((0, spec.hidden_size), dtype=dtype)
                x = x[batch.out_rows]
                num_rows = len(batch.out_rows)
                attended = _select_rows(attended, batch.out_rows)
                normed = _with_padding(num_rows, spec.hidden_size, dtype)
            self._join(x, layer.o(attended), layer.attn_out_norm, layer.mlp_norm, normed)
            gate_up = layer.gate_up(normed)
            gated = _with_padding(num_rows, spec.intermediate_size, dtype)
            share_rows(cpu_kernel.gate, num_rows, as_array(gate_up), self._activation, as_array(gated))
            next_norm = self._final_norm if index == last_layer else self._layers[index + 1].attn_norm
            self._join(x, layer.down(gated), layer.mlp_out_norm, next_norm, normed)
        return normed[:num_rows]

    def sample(self, hidden: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens and both log-probs (see `Sampled`) for hidden states from `hidden`."""
        return cpu_sampler.draw(self.logits(hidden), rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states from `hidden`."""
        assert self._head is not None
        return self._head(_select_rows(hidden, np.arange(len(hidden))))[: len(hidden)]

    def _join(
        self, x: np.ndarray, out: Tensor, out_norm: np.ndarray, norm: np.ndarray, normed: Tensor
    ) -> None:
        """Add out to x (normed first where the model does that), and set normed to the norm of x."""
        target = as_array(normed)
        if len(out_norm):
            share_rows(cpu_kernel.norm_add_norm, len(x), x, as_array(out), out_norm, norm, self._eps, target)
        else:
            share_rows(cpu_kernel.add_norm, len(x), x, as_array(out), norm, self._eps, target)

    def _attention(self, index: int, layer: PackedLayer, qkv: Tensor, batch: StepBatch) -> Tensor:
        """Return attention's output before the output product.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads * head_dim].
        """
        spec = self._spec
        keys, values = self._pools[index]
        key_array = as_array(keys)
        value_array = as_array(values)
        num_rows = len(batch.token_ids)
        qkv = qkv.view(len(qkv), -1, spec.head_dim)
        qkv_array = as_array(qkv)
        cos, sin = self._tables[spec.rope_kinds[index]]
        tokens = qkv_array, batch.positions, batch.places, spec.num_heads
        norms = layer.q_norm, layer.k_norm, self._eps
        share_rows(cpu_kernel.turn_and_keep, num_rows, *tokens, *norms, cos, sin, key_array, value_array)
        attended = _with_padding(num_rows, spec.num_heads * spec.head_dim, qkv.dtype)
        heads = attended.view(-1, spec.num_heads, spec.head_dim)
        if batch.num_decode:
            window = spec.windows[index] or cpu_kernel.NO_WINDOW
            pool = key_array, value_array, batch.decode_tables, batch.decode_lengths, self._block_size
            queries = (qkv_array, spec.num_heads)
            out = as_array(heads)
            share_rows(cpu_kernel.attend, batch.num_decode, *queries, *pool, self._scale, window, out)
        for span in batch.spans:
            rows = slice(span.first, span.first + span.count)
            heads[rows] = self._prefill(qkv[rows], keys, values, span, spec.windows[index])
        return attended

    def _prefill(
        self, qkv: Tensor, keys: Tensor, values: Tensor, span: PrefillSpan, window: int | None
    ) -> Tensor:
        """Let one span's rows attend to all tokens of its sequence so far.

        Returns [count, num_heads, head_dim].
        """
        spec = self._spec
        end = span.start + span.count
        query = qkv[:, : spec.num_heads]
        if span.start:
            positions = np.arange(end)
            blocks = span.table[positions // self._block_size].astype(np.int64)
            places = torch.from_numpy(blocks * self._block_size + positions % self._block_size)
            key = keys[places]
            value = values[places]
        else:
            key, value = qkv[:, spec.num_heads :].chunk(2, 1)
        if qkv.dtype == torch.bfloat16 and is_worth_it(query.transpose(0, 1), end):  # SDPA is slow in it
            places = torch.arange(span.start, end)
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            return causal_attention(query, key, value, places, spec.scale, window).transpose(0, 1)
        mask = None
        if span.start or (window is not None and end > window):
            mask = torch.ones(span.count, end, dtype=torch.bool).tril_(span.start)
            if window is not None:
                mask.triu_(span.start - window + 1)
        return F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )[0].transpose(0, 1)


def _with_padding(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return [padded(num_rows), width] with uninitialised rows and a padding of 0.

    Uninitialised padding could hold denormal numbers.
    """
    buffer = torch.empty((padded(num_rows), width), dtype=dtype)
    buffer[num_rows:] = 0
    return buffer


def _select_rows(x: Tensor, rows: np.ndarray) -> Tensor:
    """Return some rows of x, with padding."""
    selected = _with_padding(len(rows), x.shape[1], x.dtype)
    selected[: len(rows)] = x[torch.from_numpy(rows)]
    return selected


def _joined(layer: dict[str, Tensor], *names: str) -> Product:
    """Join matrices with the same input to one product."""
    weights = [layer[f"{name}.weight"] for name in names]
    biases = [layer[f"{name}.bias"] for name in names if f"{name}.bias" in layer]
    return Product(torch.cat(weights), torch.cat(biases) if biases else None)
