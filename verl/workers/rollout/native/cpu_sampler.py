"""Sampling on CPU in one compiled pass over the rows.

    logits [A, V] -> largest, sums of exp by blocks of 64 -> the block that u falls into -> the token in it

Nothing is written for a row that keeps all tokens. One that truncates (top-k, top-p, min-p) writes its
exponentials once and finds the smallest that it keeps by bisection over their bits: at most 31 vectorised
passes instead of a sort. Block sums are float32, sums over blocks float64, as in `sampler.draw`.
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
_ONE_BITS = 0x3F800000  # of the float32 1.0
CALLED = "610dcf68"  # digest of what these kernels call in cpu_kernel.py; a test says why, and what to write


def draw(logits_AV: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample one token per row, as `sampler.draw` does, of logits float32 or bfloat16 [A, V], which stay as
    they are. Returns token ids int64 [A]; log-probs and the plain model's log-probs, float64 [A].
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
    kept = np.empty((1, vocab if cut[first:last].any() else 0), dtype=np.float32)
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
                kept[0, i] = exp_nonpositive((load(logits[row, i]) - top) * scale)
            least = _least_kept(kept, top_k[row], top_p[row], min_p[row])
            for i in range(vocab):  # as logits again, so that the rest is as for the others
                kept[0, i] = (load(logits[row, i]) - top) * scale if kept[0, i] >= least else _LOWEST
            total = _block_sums(kept, 0, _ZERO, _ONE, sums)
            token = _find(kept, 0, _ZERO, _ONE, sums, uniform[row] * total)
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
    """The smallest of values [1, V] (exponentials, the largest is 1) that top-k, then top-p, then min-p keep.

    Each limit is the largest threshold whose values at or above it still are k, or sum to p. Positive floats
    are ordered as their bits are.
    """
    least = _ZERO
    if 0 < top_k < values.shape[1]:
        least = _bisect(values, least, np.float64(top_k), True)
    if top_p < 1.0:
        least = _bisect(values, least, top_p * _amount(values, least, False), False)
    return max(least, np.float32(min_p))


@jit
def _bisect(values, least, wanted, counting):
    """The largest threshold, `least` or more, whose values at or above it amount to `wanted`."""
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
    """How many values [1, V] are at or above `least`, or their sum."""
    row = values[0]
    total = 0.0
    for start in range(0, row.shape[0], 1024):
        part = row[start : start + 1024]
        part_sum = _ZERO
        if counting:
            for i in range(part.shape[0]):
                part_sum += _ONE if part[i] >= least else _ZERO
        else:
            for i in range(part.shape[0]):
                part_sum += part[i] if part[i] >= least else _ZERO
        total += np.float64(part_sum)
    return total


@jit
def _largest(logits, row):
    """The largest logit. In lanes, because a reduction that honours NaN is not vectorised."""
    vocab = logits.shape[1]
    whole = vocab // _BLOCK
    lanes = np.full(_BLOCK, _LOWEST, dtype=np.float32)
    for block in range(whole):
        part = logits[row, block * _BLOCK : (block + 1) * _BLOCK]
        for i in range(_BLOCK):
            value = load(part[i])
            lanes[i] = value if value > lanes[i] else lanes[i]
    top = _LOWEST
    for i in range(_BLOCK):
        top = max(top, lanes[i])
    for i in range(whole * _BLOCK, vocab):
        top = max(top, load(logits[row, i]))
    return top


@jit
def _block_sums(logits, row, top, scale, sums):
    """sums[b] = sum of exp((logit - top) * scale) over block b; returns their sum in float64."""
    vocab = logits.shape[1]
    whole = vocab // _BLOCK
    total = 0.0
    for block in range(whole):
        part = logits[row, block * _BLOCK : (block + 1) * _BLOCK]
        part_sum = _ZERO
        for i in range(_BLOCK):
            part_sum += exp_nonpositive((load(part[i]) - top) * scale)
        sums[block] = part_sum
        total += np.float64(part_sum)
    if whole * _BLOCK < vocab:
        part_sum = _ZERO
        for i in range(whole * _BLOCK, vocab):
            part_sum += exp_nonpositive((load(logits[row, i]) - top) * scale)
        sums[whole] = part_sum
        total += np.float64(part_sum)
    return total


@jit
def _find(logits, row, top, scale, sums, target):
    """The token at which the running sum passes `target`; one with a probability above 0."""
    chosen = 0
    before = 0.0
    running = 0.0
    for block in range(sums.shape[0]):
        if sums[block] > _ZERO:
            chosen = block
            before = running
            running += np.float64(sums[block])
            if running > target:
                break
    low = chosen * _BLOCK
    high = min((chosen + 1) * _BLOCK, logits.shape[1])
    inside = 0.0
    for i in range(low, high):
        inside += np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
    share = max(target - before, 0.0) / np.float64(sums[chosen])  # the block's two sums round differently
    token = low
    running = 0.0
    for i in range(low, high):
        value = np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
        if value > 0.0:
            token = i
            running += value
            if running > share * inside:
                break
    return token
