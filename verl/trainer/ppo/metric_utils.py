"""Figures of one training step, under the names that Search-R1's users have on their dashboards.

Lengths, advantages, returns and values are taken over sampled tokens only. Two figures show early that a
policy collapses: `response/repeated_ngrams` and `groups/effective_share`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from verl.protocol import DataProto
from verl.workers.engine.flops import training_flops

REPEAT_LENGTH = 8  # tokens; longer than what the protocol's tags make every turn repeat


class Timer:
    """A timer of wall seconds by phase: `with timer("gen"): ...` adds to `timer.seconds["gen"]`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def _mean_max_min(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/{statistic}": getattr(values, statistic)().item() for statistic in ("mean", "max", "min")
    }


def step_metrics(batch: DataProto, timer: Timer, use_critic: bool) -> dict[str, float]:
    """Return the metrics of one step.

    They are `critic/*`, `response_length/*`, `prompt_length/*`, `state_tokens/*`, `response/*`, `groups/*`,
    `timing_*` and `perf/trained_*`, and with a critic `critic/values/*` and `critic/vf_explained_var`. If the
    batch has `sampled_mask` (tokens were rejected since, see `mask_rejected_tokens`), they count what was
    sampled.
    """
    tensors = batch.tensors
    mask = tensors["sampled_mask" if "sampled_mask" in tensors else "response_mask"].bool()
    response_width = mask.shape[1]
    attention = tensors["attention_mask"]
    prompt_lengths = attention[:, :-response_width].sum(-1)
    context_lengths = attention[:, -response_width:].sum(-1)
    sampled = mask.sum(-1)

    metrics = _mean_max_min("critic/score", tensors["token_level_scores"].sum(-1))
    metrics |= _mean_max_min("critic/rewards", tensors["token_level_rewards"].sum(-1))
    metrics |= _mean_max_min("critic/advantages", tensors["advantages"][mask])
    metrics |= _mean_max_min("critic/returns", tensors["returns"][mask])
    if use_critic:
        values = tensors["values"][mask]
        returns = tensors["returns"][mask]
        metrics |= _mean_max_min("critic/values", values)
        variance = returns.var()
        metrics["critic/vf_explained_var"] = (1 - (returns - values).var() / (variance + 1e-5)).item()
    metrics |= _mean_max_min("response_length", sampled)
    metrics |= _mean_max_min("prompt_length", prompt_lengths)
    num_read = (context_lengths - sampled).sum()
    metrics["state_tokens/total"] = int(num_read)
    metrics["state_tokens/coverage"] = (num_read / context_lengths.sum().clamp(min=1)).item()
    metrics["response/repeated_ngrams"] = repeated_ngrams(tensors["responses"], mask)
    uids = batch.non_tensor_batch["uid"]
    metrics["groups/effective_share"] = effective_group_share(tensors["advantages"], mask, uids)
    seconds = timer.seconds
    num_tokens = int((prompt_lengths + context_lengths).sum())
    metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
    for name in ("ref", "values", "adv", "update_critic", "update_actor"):
        if name in seconds and num_tokens:
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / num_tokens
    metrics["perf/trained_tokens"] = num_tokens
    update = seconds.get("update_actor", 0.0) + seconds.get("update_critic", 0.0)
    if update:
        metrics["perf/trained_tokens_per_second"] = num_tokens / update
    return metrics


def utilization(
    name: str,
    config: PretrainedConfig,
    batch: DataProto,
    seconds: float,
    peak_flops: float | None,
    has_head: bool = True,
    has_adapters: bool = False,
    num_epochs: int = 1,
) -> dict[str, float]:
    """Return `perf/mfu/NAME` of an update, or nothing if the rate of its devices is not known.

    Args:
        name: "actor", "critic" or "train" (supervised).
        config: of the model.
        batch: the rows of the update, with attention_mask and response_mask.
        seconds: of the update.
        peak_flops: FLOPs per second of all devices together; None if they are not known.
        has_head: whether loss tokens have logits.
        has_adapters: whether LoRA adapters are trained, not the model.
        num_epochs: passes over the rows.
    """
    if peak_flops is None or seconds <= 0:
        return {}
    lengths = batch.tensors["attention_mask"].sum(-1)
    num_loss_tokens = int(batch.tensors["response_mask"].sum()) if has_head else 0
    flops = num_epochs * training_flops(config, lengths, num_loss_tokens, has_adapters)
    return {f"perf/mfu/{name}": flops / (seconds * peak_flops)}


def repeated_ngrams(responses: torch.Tensor, mask: torch.Tensor, length: int = REPEAT_LENGTH) -> float:
    """Return the share of n-grams that occurred in the same trajectory before.

    The share is near 0 for ordinary text, and near 1 for a policy that writes the same words again and again.
    An n-gram never reaches across an observation. The share is 0 if there is no n-gram.

    Args:
        responses: tokens, [N, R] int64.
        mask: where the policy sampled, [N, R] bool.
        length: how many sampled tokens in a row are an n-gram.
    """
    rows, columns = (index.numpy() for index in mask.nonzero(as_tuple=True))
    if len(rows) < length:
        return 0.0
    tokens = responses[mask].numpy().astype(np.uint64)
    last = length - 1
    unbroken = (rows[last:] == rows[:-last]) & (columns[last:] - columns[:-last] == last)
    hashes = rows[: len(unbroken)].astype(np.uint64)
    # A 64-bit polynomial that wraps around: equal n-grams of a row have equal numbers.
    for offset in range(length):
        hashes = hashes * _HASH_FACTOR + tokens[offset : offset + len(unbroken)]
        hashes ^= hashes >> np.uint64(29)
    hashes = np.sort(hashes[unbroken])
    return float((hashes[1:] == hashes[:-1]).sum() / len(hashes)) if len(hashes) else 0.0


_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def effective_group_share(
    advantages: torch.Tensor, mask: torch.Tensor, uids: Sequence[Any] | np.ndarray
) -> float:
    """Return the share of groups (rows of one uid) in which some sampled token has an advantage other than 0.

    The policy gradient comes from these alone. In the others all answers were equally good, or none was
    sampled.
    """
    learns = ((advantages != 0) & mask).any(dim=-1).numpy()
    groups = np.unique(np.asarray(uids, dtype=object).astype(str), return_inverse=True)[1].reshape(-1)
    return len(np.unique(groups[learns])) / (groups.max() + 1)


def seqlen_metrics(tokens_per_rank: list[int], batch: DataProto) -> dict[str, float]:
    """Return `global_seqlen/*`: how many tokens the ranks have.

    min, max and minmax_diff are of ranks to which the rows of `batch` are dealt out in order. balanced_min,
    balanced_max and mean are of the ranks as they were balanced (`tokens_per_rank`).
    """
    lengths = batch.tensors["prompt_length"] + batch.tensors["response_length"]
    chunks = [int(chunk.sum()) for chunk in lengths.chunk(len(tokens_per_rank))]
    return {
        "global_seqlen/min": min(chunks),
        "global_seqlen/max": max(chunks),
        "global_seqlen/minmax_diff": max(chunks) - min(chunks),
        "global_seqlen/balanced_min": min(tokens_per_rank),
        "global_seqlen/balanced_max": max(tokens_per_rank),
        "global_seqlen/mean": sum(tokens_per_rank) / len(tokens_per_rank),
    }
