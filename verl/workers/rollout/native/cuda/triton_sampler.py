"""Sampling from whole softmaxes in two kernels that read the logits once, and one chunk of them twice.

The general sampler makes half a dozen passes over float32 logits; at 256 sequences and 150,000 tokens each is
as dear as a tenth of the weights of a 0.5B model. Here a first kernel leaves, for every chunk of the
vocabulary, its maximum and its sums of exponentials, plain and tempered; a second one finds the chunk where
the running tempered sum passes u, and in it the token. Running sums are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.workers.rollout.native.cuda.sampler import DeviceRows

_CHUNK = 4096


def draw_whole(logits_AV: Tensor, rows: DeviceRows, softcap: float | None) -> Tensor:
    """Sample one token per row, none of which truncates; nothing is written to the logits.

    Args:
        logits_AV: [A, V] in the model's dtype, contiguous, before `softcap` (None: there is none).

    Returns:
        float64 [3, A], as `sampler.draw_on_device`.
    """
    num_rows, vocab = logits_AV.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_AV.device)
    plain, tempered = torch.empty_like(best), torch.empty_like(best)
    where = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits_AV.device)
    result = torch.empty(3, num_rows, dtype=torch.float64, device=logits_AV.device)
    has_softcap = softcap is not None
    _sum_chunks[(num_rows, num_chunks)](
        logits_AV,
        rows.temperature,
        best,
        plain,
        tempered,
        where,
        softcap or 0.0,
        vocab,
        num_chunks,
        HAS_SOFTCAP=has_softcap,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    _pick[(num_rows,)](
        logits_AV,
        rows.temperature,
        rows.uniform,
        best,
        plain,
        tempered,
        where,
        result,
        softcap or 0.0,
        vocab,
        num_chunks,
        num_rows,
        HAS_SOFTCAP=has_softcap,
        CHUNK=_CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
    return result


@triton.jit
def _load(at, inside, softcap, HAS_SOFTCAP: tl.constexpr):
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        x = tl.where(inside, softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0), float("-inf"))
    return x


@triton.jit
def _sum_chunks(
    logits,
    temperature,
    best,
    plain,
    tempered,
    where,
    softcap,
    vocab,
    num_chunks,
    HAS_SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits + row * vocab + tokens, tokens < vocab, softcap, HAS_SOFTCAP)
    heat = tl.load(temperature + row)
    heat = tl.where(heat == 0.0, 1.0, heat)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # a chunk of -inf adds nothing
    at = row * num_chunks + chunk
    tl.store(best + at, top)
    tl.store(plain + at, tl.sum(tl.exp(x - base), 0))
    tl.store(tempered + at, tl.sum(tl.exp((x - base) / heat), 0))
    tl.store(where + at, tl.min(tl.where(x == top, tokens, vocab - 1), 0))


@triton.jit
def _passes(weights, target, places, last: tl.constexpr):
    """The first place where the running sum of `weights` passes `target` times their sum; float64."""
    running = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    passed = (running > target * total) & (weights > 0.0)
    some = tl.max(tl.where(weights > 0.0, places, 0), 0)  # the last one, should rounding leave none
    return tl.minimum(tl.min(tl.where(passed, places, last), 0), some)


@triton.jit
def _pick(
    logits,
    temperature,
    uniform,
    best,
    plain,
    tempered,
    where,
    result,
    softcap,
    vocab,
    num_chunks,
    num_rows,
    HAS_SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    greedy = heat == 0.0
    heat = tl.where(greedy, 1.0, heat)

    chunks = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = chunks < num_chunks
    at = row * num_chunks + chunks
    tops = tl.load(best + at, mask=is_chunk, other=float("-inf"))
    top = tl.max(tops, 0)
    of_plain = tl.load(plain + at, mask=is_chunk, other=0.0) * tl.exp(tops - top)
    of_tempered = tl.load(tempered + at, mask=is_chunk, other=0.0) * tl.exp((tops - top) / heat)
    total_plain, total = tl.sum(of_plain, 0), tl.sum(of_tempered, 0)
    weights = of_tempered.to(tl.float64)
    target = tl.load(uniform + row)
    chunk = _passes(weights, target, chunks, BLOCK_CHUNKS)
    before = tl.sum(tl.where(chunks < chunk, weights, 0.0), 0)
    own = tl.sum(tl.where(chunks == chunk, weights, 0.0), 0)
    share = tl.maximum((target * tl.sum(weights, 0) - before) / own, 0.0)

    places = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + places < vocab
    x = _load(logits + row * vocab + chunk * CHUNK + places, inside, softcap, HAS_SOFTCAP)
    sampled = chunk * CHUNK + _passes(tl.exp((x - top) / heat).to(tl.float64), share, places, CHUNK)
    largest = tl.min(
        tl.where((tops == top) & is_chunk, tl.load(where + at, mask=is_chunk, other=0), vocab), 0
    )
    token = tl.where(greedy, largest, sampled)
    token = tl.minimum(token, vocab - 1)  # NaN: nothing passed anything; the log-probs say so

    chosen = _load(logits + row * vocab + token, token >= 0, softcap, HAS_SOFTCAP)
    tl.store(result + row, token.to(tl.float64))
    tl.store(result + num_rows + row, ((chosen - top) / heat - tl.log(total)).to(tl.float64))
    tl.store(result + 2 * num_rows + row, (chosen - top - tl.log(total_plain)).to(tl.float64))
