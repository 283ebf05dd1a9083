"""Advantages once more, slowly: float64 loops over plain lists, written from the papers' formulas.

Nothing is shared with the code that is tested. Each function takes a `Rows` and gives (advantages, returns)
as lists of lists, 0 where nothing was sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Rows:
    """A batch as plain lists; `steps[i]` are the columns that row i sampled."""

    rewards: list[list[float]]
    mask: list[list[int]]
    uids: list[Any]
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = [[t for t, kept in enumerate(row) if kept] for row in self.mask]
        self.scores = [
            math.fsum(row[t] for t in steps) for row, steps in zip(self.rewards, self.steps, strict=True)
        ]

    def group(self, i: int) -> list[int]:
        """The rows that row i is compared with, itself among them."""
        return [j for j, steps in enumerate(self.steps) if steps and self.uids[j] == self.uids[i]]

    def on_tokens(self, by_row: list[float]) -> list[list[float]]:
        return [[by_row[i] if kept else 0.0 for kept in row] for i, row in enumerate(self.mask)]

    def live(self) -> list[int]:
        return [i for i, steps in enumerate(self.steps) if steps]


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs):
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 1.0


def by_row(rows, advantage):
    """Every sampled token of row i gets advantage(i)."""
    table = rows.on_tokens([advantage(i) if rows.steps[i] else 0.0 for i in range(len(rows.mask))])
    return table, table


def whitened(rows, table):
    kept = [table[i][t] for i, steps in enumerate(rows.steps) for t in steps]
    if not kept:
        return table
    variance = std(kept) ** 2 if len(kept) > 1 else 0.0
    out = [[0.0] * len(row) for row in table]
    for i, steps in enumerate(rows.steps):
        for t in steps:
            out[i][t] = (table[i][t] - mean(kept)) / math.sqrt(variance + 1e-8)
    return out


def gae(rows):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, summed up anew for each token."""
    gamma, lam, values = (rows.extra[name] for name in ("gamma", "lam", "values"))
    advantages = [[0.0] * len(row) for row in rows.mask]
    returns = [[0.0] * len(row) for row in rows.mask]
    for i, steps in enumerate(rows.steps):
        deltas = []
        for k, t in enumerate(steps):
            after = values[i][steps[k + 1]] if k + 1 < len(steps) else 0.0
            deltas.append(rows.rewards[i][t] + gamma * after - values[i][t])
        for k, t in enumerate(steps):
            advantages[i][t] = math.fsum((gamma * lam) ** x * d for x, d in enumerate(deltas[k:]))
            returns[i][t] = advantages[i][t] + values[i][t]
    return whitened(rows, advantages), returns


def rewards_to_go(rows, gamma=1.0):
    table = [[0.0] * len(row) for row in rows.mask]
    for i, steps in enumerate(rows.steps):
        for k, t in enumerate(steps):
            table[i][t] = math.fsum(gamma**x * rows.rewards[i][s] for x, s in enumerate(steps[k:]))
    return table


def reinforce_plus_plus(rows):
    returns = rewards_to_go(rows, rows.extra["gamma"])
    return whitened(rows, returns), returns


def group_mean(rows, i, scores=None):
    """The baseline of row i: its group's mean, 0 for a row that is alone."""
    scores = scores or rows.scores
    group = rows.group(i)
    return mean([scores[j] for j in group]) if len(group) > 1 else 0.0


def group_std(rows, i, scores=None):
    scores = scores or rows.scores
    return std([scores[j] for j in rows.group(i)])


def grpo(rows):
    def advantage(i):
        divisor = group_std(rows, i) + 1e-6 if rows.extra["norm_adv_by_std_in_grpo"] else 1.0
        return (rows.scores[i] - group_mean(rows, i)) / divisor

    return by_row(rows, advantage)


def grpo_vectorized(rows):
    return grpo(rows)


def grpo_passk(rows):
    """What the group's maximum loses without row i."""

    def advantage(i):
        others = [rows.scores[j] for j in rows.group(i) if j != i]
        gain = max([*others, rows.scores[i]]) - max(others) if others else rows.scores[i]
        return gain / (group_std(rows, i) + 1e-6 if rows.extra["norm_adv_by_std_in_grpo"] else 1.0)

    return by_row(rows, advantage)


def rloo(rows):
    def advantage(i):
        others = [rows.scores[j] for j in rows.group(i) if j != i]
        return rows.scores[i] - (mean(others) if others else 0.0)

    return by_row(rows, advantage)


def rloo_vectorized(rows):
    def advantage(i):
        others = [rows.scores[j] for j in rows.group(i) if j != i]
        return rows.scores[i] - mean(others) if others else 0.0

    return by_row(rows, advantage)


def reinforce_plus_plus_baseline(rows):
    table, _ = by_row(rows, lambda i: rows.scores[i] - group_mean(rows, i))
    table = whitened(rows, table)
    return table, table


def remax(rows):
    returns = rewards_to_go(rows)
    baselines = rows.extra["reward_baselines"]
    advantages = [
        [g - baselines[i] if kept else 0.0 for g, kept in zip(returns[i], rows.mask[i], strict=True)]
        for i in range(len(returns))
    ]
    return advantages, returns


def opo(rows):
    def advantage(i):
        group = rows.group(i)
        if len(group) == 1:
            return rows.scores[i]
        lengths = [len(rows.steps[j]) for j in group]
        weighted = math.fsum(
            length * rows.scores[j] for length, j in zip(lengths, group, strict=True)
        ) / math.fsum(lengths)
        return rows.scores[i] - weighted

    return by_row(rows, advantage)


def gpg(rows):
    idle = 0
    for i in rows.live():
        scores = {rows.scores[j] for j in rows.group(i)}
        if scores == {0.0} or (len(scores) == 1 and len(rows.group(i)) > 1):
            idle += 1
    alpha = len(rows.live()) / max(len(rows.live()) - idle, 1)
    return by_row(rows, lambda i: alpha * (rows.scores[i] - group_mean(rows, i)))


def maxrl(rows):
    def advantage(i):
        if len(rows.group(i)) == 1:
            return rows.scores[i]
        success = group_mean(rows, i)
        return (rows.scores[i] - success) / success if success > 0 else 0.0

    return by_row(rows, advantage)


def gdpo(rows):
    total = [0.0] * len(rows.mask)
    for name, values in rows.extra["reward_components"].items():
        for i in rows.live():
            divisor = group_std(rows, i, values) + 1e-6 if rows.extra["norm_adv_by_std_in_grpo"] else 1.0
            weight = rows.extra["reward_weights"].get(name, 1.0)
            total[i] += weight * (values[i] - group_mean(rows, i, values)) / divisor
    live = [total[i] for i in rows.live()]
    return by_row(rows, lambda i: (total[i] - mean(live)) / (std(live) + 1e-6))


def rae(rows):
    baselines = rows.extra["baselines"]
    keys = rows.extra["baseline_keys"]
    return by_row(rows, lambda i: rows.scores[i] - baselines.get(keys[i], 0.0))


def _token_baseline(rows, positions):
    """positions[i]: column -> place at which it is compared with the other rows."""
    probs = rows.extra["old_log_probs"]
    squares = rows.extra["sum_pi_squared"]
    weights = rows.extra["rollout_is_weights"]
    returns = rewards_to_go(rows)
    advantages = [[0.0] * len(row) for row in rows.mask]
    energies = []
    for i, steps in enumerate(rows.steps):
        energies.append({})
        for k, t in enumerate(steps):
            energies[i][t] = math.fsum(
                weights[i][s] ** 2 * (1 - 2 * math.exp(probs[i][s]) + squares[i][s]) for s in steps[: k + 1]
            )
    for i, steps in enumerate(rows.steps):
        for t in steps:
            met = [(j, s) for j in rows.group(i) for s in rows.steps[j] if positions[j][s] == positions[i][t]]
            baseline = 0.0
            if len(met) > 1:
                energy = math.fsum(energies[j][s] for j, s in met)
                baseline = math.fsum(energies[j][s] * returns[j][s] for j, s in met) / energy
            advantages[i][t] = returns[i][t] - baseline
    return advantages, returns


def optimal_token_baseline(rows):
    return _token_baseline(rows, [{t: t for t in steps} for steps in rows.steps])


def tir_optimal_token_baseline(rows):
    return _token_baseline(rows, [{t: k for k, t in enumerate(steps)} for steps in rows.steps])


def turns(rows):
    """The advantage of each token's turn against the same turn of the other rows of its group."""
    turn_ids = rows.extra["turn_ids"]
    rewards = rows.extra["turn_rewards"]
    by_std = rows.extra["norm_adv_by_std_in_grpo"]

    def rewarded(j):
        return {turn_ids[j][t] for t in rows.steps[j] if not math.isnan(rewards[j][turn_ids[j][t]])}

    def turn_return(j, k):
        return math.fsum(rewards[j][later] for later in rewarded(j) if later >= k)

    advantages = [[0.0] * len(row) for row in rows.mask]
    for i, steps in enumerate(rows.steps):
        for t in steps:
            k = turn_ids[i][t]
            group = [turn_return(j, k) for j in rows.group(i) if k in rewarded(j)]
            if k in rewarded(i) and len(group) > 1:
                divisor = std(group) + 1e-6 if by_std else 1.0
                advantages[i][t] = (turn_return(i, k) - mean(group)) / divisor
    return advantages
