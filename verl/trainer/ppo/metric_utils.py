"""Figures of one training step, under the names that Search-R1's users have on their dashboards.

Lengths, advantages, returns and values are taken over sampled tokens only.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl.protocol import DataProto


class Timer:
    """Wall seconds by phase: `with timer("gen"): ...`; `timer.seconds["gen"]`.

    It begins with what the checkpoint after the step before took, whose line was written already.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float, seconds or {})

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def step_metrics(batch: DataProto, timer: Timer, use_critic: bool) -> dict[str, float]:
    """`critic/*`, `response_length/*`, `prompt_length/*`, `state_tokens/*`, `timing_*` of one step.

    Args:
        batch: rows with token_level_scores, token_level_rewards, advantages, returns (and values), all
            [N, R] float32.
        timer: the phases of this step.
        use_critic: report `critic/values/*` and `critic/vf_explained_var` too.
    """
    tensors = batch.tensors
    mask = tensors["response_mask"].bool()
    response_width = mask.shape[1]
    attention = tensors["attention_mask"]
    prompt_lengths = attention[:, :-response_width].sum(-1)
    context_lengths = attention[:, -response_width:].sum(-1)
    sampled = mask.sum(-1)

    metrics = _spread("critic/score", tensors["token_level_scores"].sum(-1))
    metrics |= _spread("critic/rewards", tensors["token_level_rewards"].sum(-1))
    metrics |= _spread("critic/advantages", tensors["advantages"][mask])
    metrics |= _spread("critic/returns", tensors["returns"][mask])
    if use_critic:
        values, returns = tensors["values"][mask], tensors["returns"][mask]
        metrics |= _spread("critic/values", values)
        variance = returns.var()
        metrics["critic/vf_explained_var"] = (1 - (returns - values).var() / (variance + 1e-5)).item()
    metrics |= _spread("response_length", sampled)
    metrics["response_length/clip_ratio"] = (context_lengths == response_width).float().mean().item()
    metrics |= _spread("prompt_length", prompt_lengths)
    metrics["prompt_length/clip_ratio"] = (
        (prompt_lengths == attention.shape[1] - response_width).float().mean().item()
    )
    metrics["state_tokens/total"] = int((context_lengths - sampled).sum())
    metrics["state_tokens/coverage"] = (
        (context_lengths - sampled).sum() / context_lengths.sum().clamp(min=1)
    ).item()
    return metrics | _timing_metrics(timer, int(sampled.sum()), int((prompt_lengths + context_lengths).sum()))


def _timing_metrics(timer: Timer, num_sampled: int, num_tokens: int) -> dict[str, float]:
    seconds = timer.seconds
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    per_token = dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), num_tokens)
    per_token["gen"] = num_sampled
    for name, count in per_token.items():
        if name in seconds and count:
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / count
    metrics["perf/generated_tokens"] = num_sampled
    metrics["perf/trained_tokens"] = num_tokens
    metrics["perf/generated_tokens_per_second"] = num_sampled / max(seconds.get("gen", 0.0), 1e-9)
    update = seconds.get("update_actor", 0.0) + seconds.get("update_critic", 0.0)
    if update:
        metrics["perf/trained_tokens_per_second"] = num_tokens / update
    return metrics


def search_failures(batch: DataProto) -> list[str]:
    """What went wrong in the trajectories that ended because a search failed; one text each."""
    errors = []
    for trajectory in batch.non_tensor_batch["trajectory"]:
        if trajectory["finish_reason"] == "search_failed":
            errors.append(
                str(next((turn["error"] for turn in trajectory["turns"] if turn.get("error")), "unknown"))
            )
    return errors


def seqlen_metrics(tokens_per_rank: list[int], lengths: torch.Tensor) -> dict[str, float]:
    """`global_seqlen/*`: tokens of a rank if rows were dealt out in order, and as they were balanced.

    Args:
        tokens_per_rank: tokens of each rank after balancing.
        lengths: [N] int64, tokens of each row before it.
    """
    chunks = [int(chunk.sum()) for chunk in lengths.chunk(len(tokens_per_rank))]
    return {
        "global_seqlen/min": min(chunks),
        "global_seqlen/max": max(chunks),
        "global_seqlen/minmax_diff": max(chunks) - min(chunks),
        "global_seqlen/balanced_min": min(tokens_per_rank),
        "global_seqlen/balanced_max": max(tokens_per_rank),
        "global_seqlen/mean": sum(tokens_per_rank) / len(tokens_per_rank),
    }
