"""What stands between a decoder's matrix products, each as one Triton kernel.

At small batches a decode step is a row of matrix products of a few microseconds each; norms, rotations and
additions as torch operations would be three times as many launches as the products. Arithmetic is float32,
results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def add_norm(
    x: Tensor,
    out: Tensor | None,
    out_norm: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: bool,
) -> Tensor:
    """RMSNorm of x + out; the sum is written to `x`.

    Args:
        x, out: [T, hidden_size]; out None: the norm of x alone.
        out_norm: weight of a norm that `out` passes before it is added (None: there is none).
        offset: norms multiply with 1 + weight.

    Returns:
        [T, hidden_size]
    """
    normed = torch.empty_like(x)
    if len(x):
        _add_norm[(len(x),)](
            x,
            x if out is None else out,
            weight if out_norm is None else out_norm,
            weight,
            normed,
            eps,
            x.shape[1],
            HAS_OUT=out is not None,
            HAS_OUT_NORM=out_norm is not None,
            OFFSET=offset,
            BLOCK=triton.next_power_of_2(x.shape[1]),
            num_warps=8 if x.shape[1] > 2048 else 4,
        )
    return normed


@triton.jit
def _add_norm(
    x_at,
    out_at,
    out_norm_at,
    weight_at,
    normed_at,
    eps,
    width,
    HAS_OUT: tl.constexpr,
    HAS_OUT_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_at + row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_OUT:
        out = tl.load(out_at + row + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_OUT_NORM:
            scale = tl.load(out_norm_at + columns, mask=inside, other=0.0).to(tl.float32)
            if OFFSET:
                scale += 1.0
            out = out * tl.rsqrt(tl.sum(out * out, 0) / width + eps) * scale
        rounded = (x + out).to(x_at.dtype.element_ty)
        tl.store(x_at + row + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.load(weight_at + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        scale += 1.0
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * scale
    tl.store(normed_at + row + columns, normed.to(x_at.dtype.element_ty), mask=inside)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    places: Tensor,
    pools: tuple[Tensor, Tensor],
    eps: float,
    offset: bool,
) -> None:
    """Norm heads (if `norms`, of queries and of keys), rotate them in place, store keys and values in pools.

    Args:
        query: [T, num_heads, head_dim]; key, value: [T, num_kv_heads, head_dim]; contiguous.
        rotation: cos and sin of all positions, [max_model_len, head_dim // 2].
        positions, places: int64 [T]; pools: [num_blocks, block_size, num_kv_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens == 0:
        return
    _rotate[(num_tokens, 2)](
        query,
        key,
        value,
        norms[0] if norms else query,
        norms[1] if norms else key,
        rotation[0],
        rotation[1],
        positions,
        places,
        pools[0],
        pools[1],
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=norms is not None,
        OFFSET=offset,
        num_warps=4,
    )


@triton.jit
def _turn(
    at,
    norm_at,
    cos,
    sin,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Both halves, rotated, of HEADS heads at `at`: (offsets of the first half, mask, first, second)."""
    columns = tl.arange(0, BLOCK_HALF)
    heads = tl.arange(0, BLOCK_HEADS)
    offsets = heads[:, None] * (2 * HALF) + columns[None, :]
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None, :]
    first = tl.load(at + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        low = tl.load(norm_at + columns, mask=columns < HALF, other=0.0).to(tl.float32)
        high = tl.load(norm_at + HALF + columns, mask=columns < HALF, other=0.0).to(tl.float32)
        if OFFSET:
            low += 1.0
            high += 1.0
        first = first * factor * low[None, :]
        second = second * factor * high[None, :]
    return offsets, inside, first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate(
    query,
    key,
    value,
    query_norm,
    key_norm,
    cos_at,
    sin_at,
    positions,
    places,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)
    angle = tl.load(positions + token) * HALF + columns
    cos = tl.load(cos_at + angle, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_at + angle, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        at = query + token * (HEADS * 2 * HALF)
        offsets, inside, first, second = _turn(
            at, query_norm, cos, sin, eps, HEADS, HALF, BLOCK_HEADS, BLOCK_HALF, HAS_NORM, OFFSET
        )
        tl.store(at + offsets, first.to(query.dtype.element_ty), mask=inside)
        tl.store(at + offsets + HALF, second.to(query.dtype.element_ty), mask=inside)
    else:
        row = token * (KV_HEADS * 2 * HALF)
        place = tl.load(places + token) * (KV_HEADS * 2 * HALF)
        own, is_own, low, high = _turn(
            key + row, key_norm, cos, sin, eps, KV_HEADS, HALF, BLOCK_KV_HEADS, BLOCK_HALF, HAS_NORM, OFFSET
        )
        low, high = low.to(key.dtype.element_ty), high.to(key.dtype.element_ty)
        tl.store(key + row + own, low, mask=is_own)
        tl.store(key + row + own + HALF, high, mask=is_own)
        tl.store(keys + place + own, low, mask=is_own)
        tl.store(keys + place + own + HALF, high, mask=is_own)
        low = tl.load(value + row + own, mask=is_own, other=0.0)
        high = tl.load(value + row + own + HALF, mask=is_own, other=0.0)
        tl.store(values + place + own, low, mask=is_own)
        tl.store(values + place + own + HALF, high, mask=is_own)


def gate_up(gate: Tensor, up: Tensor, is_silu: bool) -> Tensor:
    """activation(gate) * up, SiLU or GELU by its tanh formula; contiguous tensors of one shape."""
    result = torch.empty_like(gate)
    if gate.numel():
        _gate_up[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, result, gate.numel(), IS_SILU=is_silu, BLOCK=_BLOCK, num_warps=4
        )
    return result


@triton.jit
def _gate_up(gate_at, up_at, result_at, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_at + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(up_at + at, mask=at < size, other=0.0).to(tl.float32)
    if IS_SILU:
        act = gate * tl.sigmoid(gate)
    else:  # (1 + tanh(y)) / 2 = sigmoid(2 y)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(result_at + at, (act * up).to(result_at.dtype.element_ty), mask=at < size)
