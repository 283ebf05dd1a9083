"""Sampling on CPU in one compiled pass over the rows.

    logits [A, V] -> largest, sums of exp by blocks of 64 -> the block that u falls into -> the token in it

Nothing is written for a row that keeps all tokens. A row that truncates (top-k, top-p, min-p) writes its
exponentials once, and finds the smallest one that it keeps by bisection over their bits. That takes at most
31 vectorised passes instead of a sort. Block sums are float32, and sums over blocks are float64, as in
`sampler.draw`.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from verl.workers.rollout.native.cpu_kernel import as_array, exp_nonpositive, jit, load, share_rows
from verl.workers.rollout.sampler import SamplingRows, truncates

_BLOCK = 64
_LOWEST = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ONE_BITS = 0x3F800000  # the bits of the float32 1.0
# Digest of the functions of cpu_kernel.py that these kernels call. A test says why, and what to write here.
KERNEL_DIGEST = "fee159dc"


def draw(logits_AV: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample one token per row, as `sampler.draw` does, from logits float32 or bfloat16 [A, V].

    The logits stay as they are.

    Returns:
        Token ids int64 [A]; log-probs float64 [A]; and the plain model's log-probs float64 [A].
    """
    count, vocab = logits_AV.shape
    assert len(rows.uniform) == count, f"{len(rows.uniform)} sampling rows for {count} rows of logits"
    tokens = np.zeros(count, dtype=np.int64)
    log_probs = np.zeros(count)
    model_log_probs = np.zeros(count)
    logits = as_array(logits_AV)
    cut = truncates(rows, vocab)
    choices = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniform
    share_rows(_draw, count, logits, cut, *choices, tokens, log_probs, model_log_probs)
    return tokens, log_probs, model_log_probs


@jit
def _draw(
    first, last, logits, cut, temperature, top_k, top_p, min_p, uniform, tokens, log_probs, model_log_probs
):
    vocab = logits.shape[1]
    sums = np.empty((vocab + _BLOCK - 1) // _BLOCK, dtype=np.float32)
    buffer = np.empty((1, vocab if cut[first:last].any() else 0), dtype=np.float32)
    for row in range(first, last):
        top = _largest(logits, row)
        total = _block_sums(logits, row, top, _ONE, sums)
        model_total = total
        scale = _ONE if temperature[row] == 0.0 else np.float32(1.0 / temperature[row])
        if temperature[row] == 0.0:
            token = 0
            while token < vocab - 1 and load(logits[row, token]) != top:
                token += 1
        elif cut[row]:
            for i in range(vocab):
                buffer[0, i] = exp_nonpositive((load(logits[row, i]) - top) * scale)
            threshold = _least_kept(buffer, top_k[row], top_p[row], min_p[row])
            for i in range(vocab):  # these are logits again, so that the rest is as for other rows
                buffer[0, i] = (load(logits[row, i]) - top) * scale if buffer[0, i] >= threshold else _LOWEST
            total = _block_sums(buffer, 0, _ZERO, _ONE, sums)
            token = _find(buffer, 0, _ZERO, _ONE, sums, uniform[row] * total)
        else:
            if temperature[row] != 1.0:
                total = _block_sums(logits, row, top, scale, sums)
            token = _find(logits, row, top, scale, sums, uniform[row] * total)
        above = np.float64(load(logits[row, token])) - np.float64(top)
        tokens[row] = token
        log_probs[row] = above * np.float64(scale) - np.log(total)
        model_log_probs[row] = above - np.log(model_total)


@jit
def _least_kept(values, top_k, top_p, min_p):
    """Return the smallest of values [1, V] that top-k, then top-p, then min-p keep.

    The values are exponentials, of which the largest is 1. Each limit is the largest threshold such that the
    values at or above it still are k, or sum to p. Positive floats are ordered as their bits are.
    """
    least = _ZERO
    if 0 < top_k < values.shape[1]:
        least = _bisect(values, least, np.float64(top_k), True)
    if top_p < 1.0:
        least = _bisect(values, least, top_p * _amount(values, least, False), False)
    return max(least, np.float32(min_p))


@jit
def _bisect(values, least, wanted, counting):
    """Return the largest threshold, `least` or more, whose values at or above it amount to `wanted`."""
    low = np.int64(np.float32(least).view(np.uint32))
    high = np.int64(_ONE_BITS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if _amount(values, np.uint32(middle).view(np.float32), counting) >= wanted:
            low = middle
        else:
            high = middle
    return np.uint32(low).view(np.float32)


@jit
def _amount(values, least, counting):
    """Return how many values [1, V] are at or above `least`, or their sum."""
    row = values[0]
    total = 0.0
    for start in range(0, row.shape[0], 1024):
        chunk = row[start : start + 1024]
        chunk_sum = _ZERO
        if counting:
            for i in range(chunk.shape[0]):
                chunk_sum += _ONE if chunk[i] >= least else _ZERO
        else:
            for i in range(chunk.shape[0]):
                chunk_sum += chunk[i] if chunk[i] >= least else _ZERO
        total += np.float64(chunk_sum)
    return total


@jit
def _largest(logits, row):
    """Return the largest logit. It works in lanes, because a reduction that honours NaN is not vectorised."""
    vocab = logits.shape[1]
    num_full = vocab // _BLOCK
    lanes = np.full(_BLOCK, _LOWEST, dtype=np.float32)
    for block in range(num_full):
        chunk = logits[row, block * _BLOCK : (block + 1) * _BLOCK]
        for i in range(_BLOCK):
            value = load(chunk[i])
            lanes[i] = value if value > lanes[i] else lanes[i]
    top = _LOWEST
    for i in range(_BLOCK):
        top = max(top, lanes[i])
    for i in range(num_full * _BLOCK, vocab):
        top = max(top, load(logits[row, i]))
    return top


@jit
def _block_sums(logits, row, top, scale, sums):
    """Set sums[b] to the sum of exp((logit - top) * scale) over block b, and return their sum in float64."""
    vocab = logits.shape[1]
    num_full = vocab // _BLOCK
    total = 0.0
    for block in range(num_full):
        chunk = logits[row, block * _BLOCK : (block + 1) * _BLOCK]
        block_sum = _ZERO
        for i in range(_BLOCK):
            block_sum += exp_nonpositive((load(chunk[i]) - top) * scale)
        sums[block] = block_sum
        total += np.float64(block_sum)
    if num_full * _BLOCK < vocab:
        block_sum = _ZERO
        for i in range(num_full * _BLOCK, vocab):
            block_sum += exp_nonpositive((load(logits[row, i]) - top) * scale)
        sums[num_full] = block_sum
        total += np.float64(block_sum)
    return total


@jit
def _find(logits, row, top, scale, sums, target):
    """Return the token at which the running sum passes `target`, one with a probability above 0."""
    chosen_block = 0
    sum_before = 0.0
    running = 0.0
    for block in range(sums.shape[0]):
        if sums[block] > _ZERO:
            chosen_block = block
            sum_before = running
            running += np.float64(sums[block])
            if running > target:
                break
    low = chosen_block * _BLOCK
    high = min((chosen_block + 1) * _BLOCK, logits.shape[1])
    block_total = 0.0
    for i in range(low, high):
        block_total += np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
    # The target is taken as a share of the block, because the block's two sums round differently.
    share = max(target - sum_before, 0.0) / np.float64(sums[chosen_block])
    token = low
    running = 0.0
    for i in range(low, high):
        value = np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
        if value > 0.0:
            token = i
            running += value
            if running > share * block_total:
                break
    return token
