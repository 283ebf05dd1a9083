"""The kernels between the matrix products of a decoder on CPU: norms, rotation, attention, activation.

Each kernel is one pass over its rows, compiled by numba, where torch would take five to twenty small
operations. For a few sequences of a small model those cost more than the products. Every kernel works on rows
`first` to `last`, touches nothing else and holds no lock, so that rows can be shared out to threads.

Numbers are float32 inside. A bfloat16 tensor is passed as its uint16 bits. A shift makes it float32, and
rounding to nearest even makes it bfloat16 again. Sums may be reordered (for vector units). NaN and infinity
are honoured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_EXP_FLOOR = np.float32(-87.0)  # below it exp is taken as 0
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_GELU_SCALE = np.float32(0.7978845608028654)
_GELU_CUBE = np.float32(0.044715)
NO_WINDOW = 1 << 62
_ROWS_PER_THREAD = 8  # fewer are not worth waking a thread for

SILU = 0
GELU_TANH = 1
ACTIVATION_CODES = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def _compiled(function: Callable[..., Any], fastmath: set[str]) -> Callable[..., Any]:
    """Compile a kernel with numba.

    The machine code is kept beside the source or in the user's cache folder, if either can be written. What a
    kernel calls becomes part of it (forceinline). With calls left in it, the sampler rounded otherwise in the
    process that compiled it than in those that loaded its machine code.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": True}
    options["fastmath"] = fastmath
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": nothing is writable
        return numba.njit(**options)(function)


# Neither of these assumes that there is no NaN or infinity, because broken weights must show.
jit = partial(_compiled, fastmath={"reassoc", "contract", "arcp", "nsz"})
_exactly = partial(_compiled, fastmath={"contract", "nsz"})


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a CPU tensor's memory as a kernel takes it.

    bfloat16 is returned as uint16 bits, and all other dtypes (float32, int64, ...) as they are.
    """
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="rollout-kernel")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads


def share_rows(kernel: Callable[..., None], num_rows: int, *arguments: Any) -> None:
    """Run kernel(first, last, *arguments) over all rows, on as many threads as torch may use."""
    threads = min(torch.get_num_threads(), num_rows // _ROWS_PER_THREAD)
    if threads < 2:
        kernel(0, num_rows, *arguments)
        return
    ends = [num_rows * thread // threads for thread in range(threads + 1)]
    pool = _threads(threads - 1)
    pending = [
        pool.submit(kernel, first, last, *arguments) for first, last in zip(ends[1:], ends[2:], strict=False)
    ]
    kernel(0, ends[1], *arguments)
    for future in pending:
        future.result()


def load(x):
    """Return a stored number as float32: itself, or bfloat16 bits widened."""


def store(x, like):
    """Return a float32 as it is stored in an array that holds `like`."""


@overload(load, inline="always")
def _load(x):
    if isinstance(x, numba.types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@overload(store, inline="always")
def _store(x, like):
    if isinstance(like, numba.types.Integer):

        def rounded(x, like):
            bits = np.float32(x).view(np.uint32)
            return np.uint16(
                (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )

        return rounded
    return lambda x, like: x


@_exactly
def exp_nonpositive(x):
    """Return exp of a float32 x <= 0, within 2 units in the last place (the polynomial of Cephes' expf)."""
    n = np.int32(x * _LOG2_E - _HALF)
    steps = np.float32(n)
    r = (x - steps * _LN_2_HIGH) - steps * _LN_2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    value = (p * r * r + r + _ONE) * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    return _ZERO if x < _EXP_FLOOR else value


@_exactly
def _tanh(x):
    e = exp_nonpositive(-_TWO * abs(x))
    t = (_ONE - e) / (_ONE + e)
    return -t if x < _ZERO else t


@_exactly
def _silu(x):
    e = exp_nonpositive(-abs(x))
    return x * (e if x < _ZERO else _ONE) / (_ONE + e)


@_exactly
def _gelu_tanh(x):
    return _HALF * x * (_ONE + _tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x)))


@jit
def embed(first, last, token_ids, embedding, scale, x):
    """Set x [T, hidden] float32 to the rows `token_ids` of embedding [vocab, hidden], times scale."""
    for row in range(first, last):
        token = token_ids[row]
        for i in range(x.shape[1]):
            x[row, i] = load(embedding[token, i]) * scale


@jit
def _inverse_rms(x, row, eps):
    total = _ZERO
    for i in range(x.shape[1]):
        total += load(x[row, i]) * load(x[row, i])
    return np.float32(_ONE / np.sqrt(total / np.float32(x.shape[1]) + eps))


@jit
def norm(first, last, x, weight, eps, normed):
    """Set normed [T, hidden] to the RMS norm of x (Zhang and Sennrich, 2019), float32 in."""
    for row in range(first, last):
        factor = _inverse_rms(x, row, eps)
        for i in range(x.shape[1]):
            normed[row, i] = store(x[row, i] * factor * weight[i], normed[row, i])


@jit
def add_norm(first, last, x, delta, weight, eps, normed):
    """Add delta to x [T, hidden] float32, and set normed to the RMS norm of x."""
    for row in range(first, last):
        total = _ZERO
        for i in range(x.shape[1]):
            value = x[row, i] + load(delta[row, i])
            x[row, i] = value
            total += value * value
        factor = np.float32(_ONE / np.sqrt(total / np.float32(x.shape[1]) + eps))
        for i in range(x.shape[1]):
            normed[row, i] = store(x[row, i] * factor * weight[i], normed[row, i])


@jit
def norm_add_norm(first, last, x, delta, delta_weight, weight, eps, normed):
    """Add the RMS norm of delta to x, and set normed to the RMS norm of x."""
    for row in range(first, last):
        factor = _inverse_rms(delta, row, eps)
        total = _ZERO
        for i in range(x.shape[1]):
            value = x[row, i] + load(delta[row, i]) * factor * delta_weight[i]
            x[row, i] = value
            total += value * value
        factor = np.float32(_ONE / np.sqrt(total / np.float32(x.shape[1]) + eps))
        for i in range(x.shape[1]):
            normed[row, i] = store(x[row, i] * factor * weight[i], normed[row, i])


@jit
def gate(first, last, gate_up, activation, out):
    """Set out [T, I] to activation(gate_up[:, :I]) * gate_up[:, I:]."""
    width = out.shape[1]
    for row in range(first, last):
        gates = gate_up[row, :width]
        ups = gate_up[row, width:]
        if activation == SILU:
            for i in range(width):
                out[row, i] = store(_silu(load(gates[i])) * load(ups[i]), out[row, i])
        else:
            for i in range(width):
                out[row, i] = store(_gelu_tanh(load(gates[i])) * load(ups[i]), out[row, i])


@jit
def _turn(qkv, row, head, weight, eps, cos, sin, position):
    """Norm one head in place if there is a weight (RMS norm), then rotate it (Su et al., 2021)."""
    half = cos.shape[1]
    factor = _ONE
    if weight.shape[0] > 0:
        total = _ZERO
        for i in range(2 * half):
            total += load(qkv[row, head, i]) * load(qkv[row, head, i])
        factor = np.float32(_ONE / np.sqrt(total / np.float32(2 * half) + eps))
    firsts = qkv[row, head, :half]
    seconds = qkv[row, head, half:]
    for i in range(half):
        a = load(firsts[i]) * factor
        b = load(seconds[i]) * factor
        if weight.shape[0] > 0:
            a = a * weight[i]
            b = b * weight[half + i]
        c = cos[position, i]
        s = sin[position, i]
        firsts[i] = store(a * c - b * s, firsts[i])
        seconds[i] = store(b * c + a * s, seconds[i])


@jit
def turn_and_keep(
    first, last, qkv, positions, places, num_heads, q_norm, k_norm, eps, cos, sin, keys, values
):
    """Norm and rotate queries and keys in place, and put keys and values into the pool.

    Args:
        first: The first row.
        last: The row after the last one.
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim].
        positions: int64 [T], positions of the tokens in their sequences.
        places: int64 [T], where in the pool each token's keys and values go.
        num_heads: Number of query heads.
        q_norm: float32 [head_dim], or [0] if there is no norm.
        k_norm: float32 [head_dim], or [0] if there is no norm.
        eps: The epsilon of the norms.
        cos: float32 [positions, head_dim // 2].
        sin: float32 [positions, head_dim // 2].
        keys: Flat pool [places, num_kv_heads, head_dim].
        values: Flat pool [places, num_kv_heads, head_dim].
    """
    num_kv_heads = keys.shape[1]
    for row in range(first, last):
        position = positions[row]
        place = places[row]
        for head in range(num_heads):
            _turn(qkv, row, head, q_norm, eps, cos, sin, position)
        for head in range(num_kv_heads):
            _turn(qkv, row, num_heads + head, k_norm, eps, cos, sin, position)
            for i in range(keys.shape[2]):
                keys[place, head, i] = qkv[row, num_heads + head, i]
                values[place, head, i] = qkv[row, num_heads + num_kv_heads + head, i]


@jit
def attend(first, last, qkv, num_heads, keys, values, tables, lengths, block_size, scale, window, out):
    """Compute decode attention: one query per row over the row's blocks, read where they lie in the pool.

    Args:
        first: The first row.
        last: The row after the last one.
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim], rotated.
        num_heads: Number of query heads.
        keys: Flat pool [places, num_kv_heads, head_dim].
        values: Flat pool [places, num_kv_heads, head_dim].
        tables: int32 [D, M], the blocks of each row.
        lengths: int64 [D], positions to attend to.
        block_size: Number of positions of a block.
        scale: Factor on query-key products.
        window: Number of positions that a token sees, itself included.
        out: [T, num_heads, head_dim], the result.
    """
    num_kv_heads = keys.shape[1]
    head_dim = keys.shape[2]
    group = num_heads // num_kv_heads
    query = np.empty((num_heads, head_dim), dtype=np.float32)
    result = np.empty((num_heads, head_dim), dtype=np.float32)
    longest = 0
    for row in range(first, last):
        longest = max(longest, min(lengths[row], window))
    weights = np.empty((num_heads, longest), dtype=np.float32)
    for row in range(first, last):
        start = max(0, lengths[row] - window)
        for head in range(num_heads):
            for i in range(head_dim):
                query[head, i] = load(qkv[row, head, i]) * scale
                result[head, i] = _ZERO
        position = start
        while position < lengths[row]:
            block = position // block_size
            end = min(lengths[row], (block + 1) * block_size)
            shift = tables[row, block] * block_size - block * block_size
            _block_scores(query, keys, position + shift, end + shift, weights, position - start, group)
            position = end
        for head in range(num_heads):
            _softmax(weights, head, lengths[row] - start)
        position = start
        while position < lengths[row]:
            block = position // block_size
            end = min(lengths[row], (block + 1) * block_size)
            shift = tables[row, block] * block_size - block * block_size
            _block_sums(result, values, position + shift, end + shift, weights, position - start, group)
            position = end
        for head in range(num_heads):
            for i in range(head_dim):
                out[row, head, i] = store(result[head, i], out[row, head, i])


@jit
def _block_scores(query, keys, first, last, weights, column, group):
    """Set weights[head, column + n] to query[head] . keys[first + n] for the places first to last."""
    for place in range(first, last):
        for kv_head in range(keys.shape[1]):
            for head in range(kv_head * group, (kv_head + 1) * group):
                total = _ZERO
                for i in range(keys.shape[2]):
                    total += query[head, i] * load(keys[place, kv_head, i])
                weights[head, column + place - first] = total


@jit
def _block_sums(result, values, first, last, weights, column, group):
    """Add the sum of weights[head, column + n] * values[first + n] to result[head].

    The sum runs over the places first to last.
    """
    place = first
    while place + 4 <= last:
        n = column + place - first
        for kv_head in range(values.shape[1]):
            for head in range(kv_head * group, (kv_head + 1) * group):
                a = weights[head, n]
                b = weights[head, n + 1]
                c = weights[head, n + 2]
                d = weights[head, n + 3]
                for i in range(values.shape[2]):
                    result[head, i] += (
                        a * load(values[place, kv_head, i])
                        + b * load(values[place + 1, kv_head, i])
                        + c * load(values[place + 2, kv_head, i])
                        + d * load(values[place + 3, kv_head, i])
                    )
        place += 4
    while place < last:
        for kv_head in range(values.shape[1]):
            for head in range(kv_head * group, (kv_head + 1) * group):
                a = weights[head, column + place - first]
                for i in range(values.shape[2]):
                    result[head, i] += a * load(values[place, kv_head, i])
        place += 1


@jit
def _softmax(scores, g, count):
    top = scores[g, 0]
    for n in range(count):
        top = max(top, scores[g, n])
    total = _ZERO
    for n in range(count):
        value = exp_nonpositive(scores[g, n] - top)
        scores[g, n] = value
        total += value
    factor = _ONE / total
    for n in range(count):
        scores[g, n] *= factor
