"""Sampling on CPU in one pass over the logits: no probabilities are written.

    logits [A, V] -> largest, sums of exp by blocks of 64 -> the block that u falls into -> the token in it

A row that truncates (top-k, top-p, min-p) is cut by `sampler.truncate` first and then drawn from like the
others. The arithmetic is that of `sampler.draw`: sums of blocks in float32, over blocks in float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.cpu_kernel import as_array, exp_nonpositive, jit, load, share_rows
from verl.workers.rollout.native.sampler import SamplingRows, truncate, truncates

_BLOCK = 64
_LOWEST = np.float32(-np.inf)
_ZERO = np.float32(0.0)


def draw(logits_AV: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample one token per row, as `sampler.draw` does.

    Args:
        logits_AV: float32 or bfloat16 [A, V]; stays as it is.

    Returns:
        token ids int64 [A]; log-probs and the plain model's log-probs, float64 [A].
    """
    count, vocab = logits_AV.shape
    tokens = np.zeros(count, dtype=np.int64)
    log_probs, model_log_probs = np.zeros(count), np.zeros(count)
    logits = as_array(logits_AV)
    cut = truncates(rows, vocab)
    share_rows(_draw, count, logits, cut, rows.temperature, rows.uniform, tokens, log_probs, model_log_probs)
    if cut.any():
        index = np.flatnonzero(cut)
        kept = torch.from_numpy(index)
        scaled = logits_AV[kept].float() / torch.from_numpy(rows.temperature[index]).float()[:, None]
        left = truncate(scaled, *(torch.from_numpy(x[index]) for x in (rows.top_k, rows.top_p, rows.min_p)))
        ones, none = np.ones(len(index)), np.zeros(len(index), dtype=np.bool_)
        drawn, drawn_log_probs, unused = (
            np.zeros(len(index), dtype=np.int64),
            np.zeros(len(index)),
            ones.copy(),
        )
        share_rows(
            _draw, len(index), left.numpy(), none, ones, rows.uniform[index], drawn, drawn_log_probs, unused
        )
        # `_draw` has left the log of the plain softmax's denominator where the model's log-prob goes.
        chosen = logits_AV[kept, torch.from_numpy(drawn)].double().numpy()
        tokens[index], log_probs[index] = drawn, drawn_log_probs
        model_log_probs[index] = chosen - model_log_probs[index]
    return tokens, log_probs, model_log_probs


@jit
def _draw(first, last, logits, cut, temperature, uniform, tokens, log_probs, model_log_probs):
    """Rows `first` to `last`. A row that is `cut` gets only its log of the denominator (model_log_probs)."""
    vocab = logits.shape[1]
    num_blocks = (vocab + _BLOCK - 1) // _BLOCK
    sums = np.empty(num_blocks, dtype=np.float32)
    for row in range(first, last):
        top = _largest(logits, row)
        total = _block_sums(logits, row, top, np.float32(1.0), sums)
        if cut[row]:
            model_log_probs[row] = np.float64(top) + np.log(total)
            continue
        model_total = total
        scale = np.float32(1.0)
        if temperature[row] == 0.0:
            token = 0
            while token < vocab - 1 and load(logits[row, token]) != top:
                token += 1
        else:
            if temperature[row] != 1.0:
                scale = np.float32(1.0 / temperature[row])
                total = _block_sums(logits, row, top, scale, sums)
            token = _find(logits, row, top, scale, sums, uniform[row] * total)
        above = np.float64(load(logits[row, token])) - np.float64(top)
        tokens[row] = token
        log_probs[row] = above * np.float64(scale) - np.log(total)
        model_log_probs[row] = above - np.log(model_total)


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
    chosen, before, running = 0, 0.0, 0.0
    for block in range(sums.shape[0]):
        if sums[block] > _ZERO:
            chosen, before = block, running
            running += np.float64(sums[block])
            if running > target:
                break
    low, high = chosen * _BLOCK, min((chosen + 1) * _BLOCK, logits.shape[1])
    inside = 0.0
    for i in range(low, high):
        inside += np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
    share = max(target - before, 0.0) / np.float64(sums[chosen])  # the block's two sums round differently
    token, running = low, 0.0
    for i in range(low, high):
        value = np.float64(exp_nonpositive((load(logits[row, i]) - top) * scale))
        if value > 0.0:
            token = i
            running += value
            if running > share * inside:
                break
    return token
