"""`native/sampler.py` for a captured step: the same draws from tensors alone, without a look at their values.

What the CPU sampler decides by looking at its rows (who is greedy, who truncates) is a `where` here. Only
whether any row truncates is known beforehand, on the host: sorting the vocabulary would cost as much as the
model's step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.sampler import SamplingRows, inverse_cdf

ARRAYS: dict[str, np.dtype] = {
    "temperature": np.dtype(np.float32),
    "top_k": np.dtype(np.int64),
    "top_p": np.dtype(np.float64),
    "min_p": np.dtype(np.float64),
    "uniform": np.dtype(np.float64),
}
"""What the sampler wants on the device, by the names of `SamplingRows`."""


@dataclass(frozen=True)
class DeviceRows:
    """`SamplingRows` as tensors [A]: temperature float32, top_k int64, the others float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def row_arrays(rows: SamplingRows) -> dict[str, np.ndarray]:
    """The rows by name, in the dtypes of `ARRAYS`."""
    return {name: getattr(rows, name).astype(dtype) for name, dtype in ARRAYS.items()}


def draw_on_device(logits_AV: Tensor, rows: DeviceRows, truncates: bool) -> Tensor:
    """Sample one token per row, as `native.sampler.draw` does.

    Args:
        logits_AV: float32 [A, V]; may be overwritten.
        truncates: False promises that no row has top-k, top-p or min-p.

    Returns:
        float64 [3, A]: token ids, log-probs of the distribution that was sampled from (greedy rows: of the
        plain softmax), log-probs of the plain softmax.
    """
    greedy_A = rows.temperature == 0.0
    best_A = logits_AV.argmax(-1)
    scaled_AV = logits_AV / torch.where(greedy_A, 1.0, rows.temperature)[:, None]
    if truncates:
        scaled_AV = truncate_on_device(scaled_AV, rows, greedy_A)
    sampled_A = inverse_cdf(torch.softmax(scaled_AV, -1), rows.uniform)
    tokens_A = torch.where(greedy_A, best_A, sampled_A)
    log_probs_A, model_log_probs_A = (
        x_AV.gather(1, tokens_A[:, None])[:, 0] - x_AV.logsumexp(-1) for x_AV in (scaled_AV, logits_AV)
    )
    return torch.stack([x.to(torch.float64) for x in (tokens_A, log_probs_A, model_log_probs_A)])


def truncate_on_device(logits_AV: Tensor, rows: DeviceRows, greedy_A: Tensor) -> Tensor:
    """`native.sampler.truncate` of all rows; greedy ones stay as they are."""
    vocab = logits_AV.shape[1]
    off_A1 = torch.full_like(logits_AV[:, :1], float("-inf"))
    ordered_AV = logits_AV.sort(-1, descending=True).values
    k_A1 = torch.where((rows.top_k > 0) & ~greedy_A, rows.top_k, vocab).clamp(max=vocab)[:, None]
    below_k = torch.arange(vocab, device=logits_AV.device) >= k_A1
    running_AV = (
        torch.softmax(ordered_AV.masked_fill_(below_k, float("-inf")), -1).to(torch.float64).cumsum(-1)
    )
    limit_A1 = torch.where((rows.top_p < 1.0) & ~greedy_A, rows.top_p, 2.0)[:, None]  # 2: nothing is cut
    kept_A1 = ((running_AV < limit_A1).sum(-1, keepdim=True) + 1).minimum(k_A1)
    least_A1 = torch.where(kept_A1 < vocab, ordered_AV.gather(1, kept_A1 - 1), off_A1)
    floor_A1 = ordered_AV[:, :1] + rows.min_p.log().to(logits_AV.dtype)[:, None]  # -inf where min_p is 0
    least_A1 = torch.maximum(least_A1, torch.where(greedy_A[:, None], off_A1, floor_A1))
    return logits_AV.masked_fill(logits_AV < least_A1, float("-inf"))
