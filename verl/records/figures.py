"""Figures of a benchmark from its lines of results: means, pass@j, intervals over its examples.

The seeds of its rollouts are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
# The finish reasons of rollouts without a known reward.
UNKNOWN_REWARD_REASONS = ("unverified", "env_failed", "search_failed")


def mean_with_interval(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return [mean, low, high] of one value per example.

    The bounds hold 95 % of the means of as many examples, drawn with replacement (percentile bootstrap, Efron
    1979).
    """
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 500):  # so that many examples need little memory
        draws = rng.integers(0, len(array), (500, len(array)))
        means[start : start + 500] = array[draws].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(array.mean()), float(low), float(high)]


def rollout_seed(seed: int, rollout_id: tuple[int, int]) -> int:
    """Return 63 bits for the sampling of (example, number of its rollout)."""
    return int(np.random.SeedSequence([seed, *rollout_id]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def pass_at(num: int, num_solved: int, j: int) -> float:
    """Return the share of the choices of j out of `num` rollouts that contain a solved one.

    The estimate is unbiased: 1 - C(num - num_solved, j) / C(num, j) (Chen et al. 2021, arXiv:2107.03374).

    Raises:
        ValueError: If j > num or j < 1.
    """
    if not 1 <= j <= num:
        raise ValueError(f"pass@{j} of {num} rollouts; expected 1 to {num}")
    return 1.0 - math.comb(num - num_solved, j) / math.comb(num, j)


def summarize(lines: Sequence[dict[str, Any]], solved_at: float) -> dict[str, Any]:
    """Return the figures of all lines and, in `by_task`, those of each task if there are several.

    - `num_examples`, `num_rollouts`, `num_truncated`: counts.
    - `num_unverified`: the number of rollouts whose worth nobody knows. They are in no figure of rewards.
    - `k`: the largest number of rollouts of an example.
    - `avg@k`, `em`, `f1`, and `pass@j` for all j <= k: each is [mean, low, high] over examples. An example is
      in pass@j if j of its rollouts were verified. A rollout is solved if its reward is `solved_at` or more.
    - `searches`, `completion_len`: means over verified rollouts.
    - The figures of `verl/evaluation/similarity.py`: each is [mean, low, high] over examples, of verified
      rollouts.
    """
    figures = _figures(lines, solved_at)
    tasks = sorted({str(line["task"]) for line in lines})
    if len(tasks) > 1:
        figures["by_task"] = {
            task: _figures([line for line in lines if str(line["task"]) == task], solved_at) for task in tasks
        }
    return figures


def _figures(lines: Sequence[dict[str, Any]], solved_at: float) -> dict[str, Any]:
    examples: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        examples.setdefault(line["example_id"], []).append(line)
    k = max(map(len, examples.values()), default=0)
    verified = [[line for line in group if line["reward"] is not None] for group in examples.values()]
    groups = [group for group in verified if group]
    figures: dict[str, Any] = {
        "num_examples": len(examples),
        "num_rollouts": len(lines),
        "num_unverified": sum(line["reward"] is None for line in lines),
        "num_truncated": sum(line["is_truncated"] for line in lines),
        "k": k,
    }
    for name, key in ((f"avg@{k}", "reward"), ("em", "em"), ("f1", "f1")):
        if groups:
            figures[name] = mean_with_interval(
                [float(np.mean([line[key] for line in group])) for group in groups]
            )
    for j in range(1, k + 1):
        shares = [
            pass_at(len(group), sum(line["reward"] >= solved_at for line in group), j)
            for group in groups
            if len(group) >= j
        ]
        if shares:
            figures[f"pass@{j}"] = mean_with_interval(shares)
    verified_lines = [line for group in groups for line in group]
    for name in ("searches", "completion_len"):
        figures[name] = float(np.mean([line[name] for line in verified_lines])) if verified_lines else None
    for block in ("similarity", "retrieval"):
        for name in sorted({name for line in verified_lines for name in line.get(block) or ()}):
            means = []
            for group in groups:
                values = [value for line in group if (value := (line.get(block) or {}).get(name)) is not None]
                means += [float(np.mean(values))] if values else []
            if means:
                figures[name] = mean_with_interval(means)
    for name in ("prompt_tokens", "completion_tokens", "cost"):
        if lines and name in lines[0]:
            figures[name] = sum(line[name] for line in lines)
    return figures
