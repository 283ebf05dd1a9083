"""The sampler: from logits to tokens and their log-probs, with randomness that belongs to the session alone.

The k-th token of a session uses uniform(seed, k), a hash, so a result does not depend on what else is in the
batch. Sampling is by inverse CDF: it takes the token at which the running sum of probabilities passes that
number. `native/cpu_sampler.py` does the same in compiled code. In vLLM's model runner this sampler replaces
vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.utils.device import to_device

MAX_LOGITS = 1 << 26  # maximum number of logits that are sampled at once; more rows are sampled in pieces
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return float64 [A] in [0, 1) with 53 random bits, a pure function of each (seed, counter).

    Seeds are mixed first, so that neighbours give unrelated streams (splitmix64: Steele, Lea and Flood,
    2014).

    Args:
        seeds: uint64 [A].
        counters: uint64 [A].
    """
    bits = _splitmix64(_splitmix64(seeds) + (counters + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass
class SamplingRows:
    """The sampling choices of A rows, as arrays [A].

    Attributes:
        temperature: float64 (0 = greedy).
        top_k: int64 (0 = off).
        top_p: float64 (1 = off).
        min_p: float64 (0 = off).
        uniform: float64 in [0, 1).
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def __getitem__(self, rows: slice) -> SamplingRows:
        return SamplingRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def truncates(rows: SamplingRows, vocab: int) -> np.ndarray:
    """Return bool [A], true for rows whose top-k, top-p or min-p may leave tokens out."""
    top_k = (rows.top_k > 0) & (rows.top_k < vocab)
    return (top_k | (rows.top_p < 1.0) | (rows.min_p > 0.0)) & (rows.temperature > 0.0)


def draw(logits_AV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row of logits float32 [A, V], on any device. The host does not wait for it.

    Returns:
        Token ids int64 [A]; log-probs float32 [A] under the tempered, truncated and renormalised distribution
        that was sampled from (for greedy rows under the plain softmax); and log-probs float32 [A] under the
        plain softmax.
    """
    device = logits_AV.device
    greedy = rows.temperature == 0.0
    cut = truncates(rows, logits_AV.shape[1])
    scaled_AV = logits_AV
    if (rows.temperature[~greedy] != 1.0).any():
        scale_A = to_device(torch.from_numpy(np.where(greedy, 1.0, rows.temperature)), device)
        scaled_AV = logits_AV / scale_A.to(logits_AV.dtype)[:, None]
    if cut.any():
        index = to_device(torch.from_numpy(np.flatnonzero(cut)), device)
        limits = (to_device(torch.from_numpy(x[cut]), device) for x in (rows.top_k, rows.top_p, rows.min_p))
        scaled_AV = scaled_AV.index_copy(0, index, truncate(scaled_AV[index], *limits))
    probs_AV = torch.softmax(scaled_AV, -1)
    tokens_A = inverse_cdf(probs_AV, to_device(torch.from_numpy(rows.uniform), device))
    if greedy.any():
        tokens_A = torch.where(to_device(torch.from_numpy(greedy), device), logits_AV.argmax(-1), tokens_A)
    tokens_A1 = tokens_A[:, None]
    log_probs_A = model_log_probs_A = probs_AV.gather(1, tokens_A1)[:, 0].log()
    if scaled_AV is not logits_AV:
        model_log_probs_A = logits_AV.log_softmax(-1).gather(1, tokens_A1)[:, 0]
    return tokens_A, log_probs_A, model_log_probs_A


def draw_in_pieces(logits_AV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Sample as `draw` does from logits of any dtype, at most MAX_LOGITS elements at a time."""
    max_rows = max(1, MAX_LOGITS // logits_AV.shape[1])
    starts = range(0, len(logits_AV), max_rows)
    pieces = [draw(logits_AV[i : i + max_rows].float(), rows[slice(i, i + max_rows)]) for i in starts]
    tokens, log_probs, model_log_probs = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    return tokens, log_probs, model_log_probs


def inverse_cdf(probs_AV: Tensor, uniform_A: Tensor) -> Tensor:
    """Return the token at which the running sum of probabilities passes u, int64 [A].

    The probability of the token is above 0.

    Args:
        probs_AV: float32, non-negative, each row with a sum > 0 (rows need not sum to 1).
        uniform_A: float64 in [0, 1).
    """
    running_AV = probs_AV.cumsum(-1, dtype=torch.float64)
    total_A1 = running_AV[:, -1:]
    target_A1 = uniform_A[:, None] * total_A1
    # Rounding may take the product up to the total, which no running sum passes.
    below_A1 = torch.nextafter(total_A1, torch.zeros_like(total_A1))
    token_A1 = torch.searchsorted(running_AV, torch.minimum(target_A1, below_A1), right=True)
    return token_A1.clamp_(max=probs_AV.shape[1] - 1)[:, 0]  # with NaN the search ends past the last token


def truncate(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Set to -inf what top-k, then top-p, then min-p leave out.

    The most probable token always stays, and so do tokens as probable as the last one that is kept.

    Args:
        logits_RV: float32.
        top_k_R: int64 (0 = off).
        top_p_R: float64 (1 = off).
        min_p_R: float64 (0 = off).
    """
    vocab = logits_RV.shape[1]
    ordered_RV = logits_RV.sort(-1, descending=True).values
    k_R1 = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)[:, None]
    beyond_k_RV = torch.arange(vocab, device=logits_RV.device) >= k_R1
    running_RV = ordered_RV.masked_fill(beyond_k_RV, float("-inf")).softmax(-1).to(torch.float64).cumsum(-1)
    # A limit of 2 keeps rounding from cutting tokens where top-p is off.
    limit_R1 = torch.where(top_p_R < 1.0, top_p_R, 2.0)[:, None]
    num_kept_R1 = ((running_RV < limit_R1).sum(-1, keepdim=True) + 1).minimum(k_R1)
    floor_R1 = ordered_RV[:, :1] + min_p_R.log().to(logits_RV.dtype)[:, None]  # -inf where min_p is off
    least_R1 = torch.maximum(ordered_RV.gather(1, num_kept_R1 - 1), floor_R1)
    return logits_RV.masked_fill(logits_RV < least_R1, float("-inf"))
