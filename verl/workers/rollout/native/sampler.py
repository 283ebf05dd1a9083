"""From logits to tokens and their log-probs, with randomness that belongs to the session alone.

The k-th token of a session uses uniform(seed, k), a hash, so a result does not depend on what else is in the
batch. Sampling is by inverse CDF, in two levels: block sums of the probabilities find the block, a scan
within it finds the token. That costs one pass over the vocabulary and keeps the sums in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 [A] in [0, 1) with 53 random bits, a pure function of each (seed, counter).

    Args:
        seeds, counters: uint64 [A]. Seeds are mixed first, so that neighbours give unrelated streams
        (splitmix64: Steele, Lea and Flood, 2014).
    """
    bits = _splitmix64(_splitmix64(seeds) + (counters + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass
class SamplingRows:
    """Sampling choices of A rows, as arrays: float64 `temperature` (0 = greedy), int64 `top_k` (0 = off),
    float64 `top_p` (1 = off), float64 `min_p` (0 = off), float64 `uniform` in [0, 1)."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def __getitem__(self, rows: slice) -> SamplingRows:
        return SamplingRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits_AV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits_AV: float32 [A, V]; may be overwritten.

    Returns:
        token ids int64 [A]; log-probs float32 [A] under the tempered, truncated and renormalised distribution
        that was sampled from (for greedy rows: under the plain softmax); log-probs float32 [A] under the
        plain softmax. Where a row neither tempers nor truncates, the two are the same number.
    """
    device = logits_AV.device
    greedy = rows.temperature == 0.0
    cut = truncates(rows, logits_AV.shape[1])
    tempered = (rows.temperature != 1.0) & ~greedy
    changed = bool(cut.any() or tempered.any())
    plain_AV = logits_AV.clone() if changed else logits_AV
    if tempered.any():
        scale = torch.from_numpy(np.where(greedy, 1.0, rows.temperature)).to(device, logits_AV.dtype)
        logits_AV = logits_AV.div_(scale[:, None])
    if cut.any():
        index = torch.from_numpy(np.flatnonzero(cut)).to(device)
        limits = (torch.from_numpy(x[cut]).to(device) for x in (rows.top_k, rows.top_p, rows.min_p))
        logits_AV[index] = truncate(logits_AV[index], *limits)
    probs_AV = torch.softmax(logits_AV, -1)
    if greedy.all():
        tokens = logits_AV.argmax(-1)
    else:
        tokens = inverse_cdf(probs_AV, torch.from_numpy(rows.uniform).to(device))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), logits_AV.argmax(-1), tokens)
    log_probs = probs_AV.gather(1, tokens[:, None])[:, 0].log()
    if not changed:
        return tokens, log_probs, log_probs
    return tokens, log_probs, plain_AV.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def truncates(rows: SamplingRows, vocab: int) -> np.ndarray:
    """bool [A]: rows whose top-k, top-p or min-p may leave tokens out."""
    top_k = (rows.top_k > 0) & (rows.top_k < vocab)
    return (top_k | (rows.top_p < 1.0) | (rows.min_p > 0.0)) & (rows.temperature > 0.0)


def inverse_cdf(probs_AV: Tensor, uniform_A: Tensor) -> Tensor:
    """The token at which the running sum of probabilities passes u: int64 [A].

    Args:
        probs_AV: float32 [A, V], non-negative, each row's sum > 0 (rows need not sum to 1).
        uniform_A: float64 [A] in [0, 1).
    """
    num_rows, vocab = probs_AV.shape
    size = 64 if vocab <= 16384 else 256
    whole = vocab // size
    sums = probs_AV[:, : whole * size].unflatten(1, (whole, size)).sum(-1)
    if whole * size < vocab:
        sums = torch.cat((sums, probs_AV[:, whole * size :].sum(-1, keepdim=True)), 1)
    running = sums.to(torch.float64).cumsum(-1)
    target = _below(uniform_A[:, None] * running[:, -1:], running[:, -1:])
    block = torch.searchsorted(running, target, right=True).clamp_(max=sums.shape[1] - 1)  # NaN: past the end
    block_end = running.gather(1, block)
    block_sum = sums.gather(1, block).to(torch.float64)
    share = (target - (block_end - block_sum)).clamp_(min=0.0) / block_sum

    members = block * size + torch.arange(size, device=probs_AV.device)
    inside = probs_AV.gather(1, members.clamp(max=vocab - 1)).to(torch.float64)
    inside = inside.masked_fill_(members >= vocab, 0.0).cumsum(-1)
    target = _below(share * inside[:, -1:], inside[:, -1:])
    return (block * size + torch.searchsorted(inside, target, right=True)).clamp_(max=vocab - 1)[:, 0]


def _below(x: Tensor, bound: Tensor) -> Tensor:
    """x, or the largest number below the bound where rounding took x up to it."""
    return torch.minimum(x, torch.nextafter(bound, torch.zeros_like(bound)))


def truncate(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Set to -inf what top-k, then top-p, then min-p leave out; the most probable token always stays.

    Args:
        logits_RV: float32 [R, V]; top_k_R: int64 (0 = off); top_p_R, min_p_R: float64 (1 and 0 = off).

    Tokens as probable as the last one that top-k or top-p keeps are kept too.
    """
    vocab = logits_RV.shape[1]
    least_R1 = torch.full_like(logits_RV[:, :1], float("-inf"))
    if bool((top_p_R < 1.0).any()):
        ordered = logits_RV.sort(-1, descending=True).values
        k = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)[:, None]
        ordered = ordered.masked_fill(torch.arange(vocab, device=ordered.device) >= k, float("-inf"))
        running = torch.softmax(ordered, -1).to(torch.float64).cumsum(-1)
        limit = torch.where(top_p_R < 1.0, top_p_R, 2.0)[:, None]  # 2: rounding must not cut where it is off
        kept = ((running < limit).sum(-1, keepdim=True) + 1).minimum(k)
        least_R1 = ordered.gather(1, kept - 1)
    elif bool((top_k_R > 0).any()):
        k = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)
        most = int(torch.where(k < vocab, k, 0).max())
        ordered = logits_RV.topk(most, -1).values
        kth = ordered.gather(1, k.clamp(max=most)[:, None] - 1)
        least_R1 = torch.where(k[:, None] < vocab, kth, least_R1)
    if bool((min_p_R > 0.0).any()):
        floor = logits_RV.amax(-1, keepdim=True) + min_p_R.log().to(logits_RV.dtype)[:, None]
        least_R1 = torch.maximum(least_R1, floor)
    return logits_RV.masked_fill(logits_RV < least_R1, float("-inf"))
