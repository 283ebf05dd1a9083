"""The policy losses and aggregations once more: plain Python loops over lists of floats, from the formulas.

Nothing is shared with the code under test. A row is what the policy sampled of one trajectory: there is no
mask here, tokens that were not sampled are never seen. Where a formula stops the gradient, it is computed
from `x0`, which stays where it is when `x` is moved to take a finite difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """Lists over the sampled tokens of one trajectory: log-probs, the same as constants, old log-probs,
    advantages, rollout weights, teacher log-probs, whether the token was chosen.
    """

    x: list[float]
    x0: list[float]
    old: list[float]
    advantages: list[float]
    weights: list[float]
    teacher: list[float]
    chosen: list[bool]

    def __len__(self) -> int:
        return len(self.x)


Tokens = list[dict[str, float]]  # of each token: "loss" (weighted), and the metrics by name
SlowLoss = Callable[[Row, dict[str, Any]], Tokens]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def bounds(config: dict[str, Any]) -> tuple[float, float]:
    low = config["clip_ratio_low"]
    high = config["clip_ratio_high"]
    return (config["clip_ratio"] if low is None else low), (config["clip_ratio"] if high is None else high)


def vanilla(row: Row, config: dict[str, Any]) -> Tokens:
    low, high = bounds(config)
    tokens = []
    for t in range(len(row)):
        advantage = row.advantages[t]
        ratio = math.exp(row.x[t] - row.old[t])
        plain = -advantage * ratio
        clipped = -advantage * clip(ratio, 1 - low, 1 + high)
        loss = max(plain, clipped)
        token = {}
        if config["clip_ratio_c"] is not None:
            most = -advantage * config["clip_ratio_c"]
            token["pg_clipfrac_lower"] = float(advantage < 0 and loss > most)
            loss = min(loss, most) if advantage < 0 else loss
        token |= {"loss": loss * row.weights[t], "pg_clipfrac": float(clipped > plain)}
        tokens.append(token | {"ppo_kl": row.old[t] - row.x[t]})
    return tokens


def gspo(row: Row, config: dict[str, Any]) -> Tokens:
    low, high = bounds(config)
    mean = sum(a - b for a, b in zip(row.x0, row.old, strict=True)) / max(len(row), 1)
    tokens = []
    for t in range(len(row)):
        s = math.exp(mean) * math.exp(row.x[t]) / math.exp(row.x0[t])
        plain = -row.advantages[t] * s
        clipped = -row.advantages[t] * clip(s, 1 - low, 1 + high)
        tokens.append(
            {
                "loss": max(plain, clipped) * row.weights[t],
                "pg_clipfrac": float(clipped > plain),
                "ppo_kl": row.old[t] - row.x[t],
            }
        )
    return tokens


def geo_mean(row: Row, config: dict[str, Any]) -> Tokens:
    if not len(row):
        return []
    low, high = bounds(config)
    advantage = sum(row.advantages) / len(row)
    product = 1.0
    weight = 1.0
    cuts = []
    for t in range(len(row)):
        log_ratio = row.x[t] - row.old[t]
        kept = log_ratio
        if advantage > 0:
            kept = min(log_ratio, high)
        elif advantage < 0:
            kept = max(log_ratio, -low)
        product *= math.exp(kept)
        weight *= row.weights[t]
        cuts.append(float(not -low <= log_ratio <= high))
    loss = -advantage * product ** (1 / len(row)) * weight ** (1 / len(row))
    return [
        {
            "loss": loss,
            "pg_clipfrac": cuts[t] * (row.advantages[t] > 0),
            "pg_clipfrac_lower": cuts[t] * (row.advantages[t] < 0),
            "ppo_kl": row.old[t] - row.x[t],
        }
        for t in range(len(row))
    ]


def sapo(row: Row, config: dict[str, Any]) -> Tokens:
    tokens = []
    for t in range(len(row)):
        tau = config["tau_pos"] if row.advantages[t] > 0 else config["tau_neg"]
        p = 1 / (1 + math.exp(-tau * (math.exp(row.x[t] - row.old[t]) - 1)))
        tokens.append(
            {
                "loss": -p * 4 / tau * row.advantages[t] * row.weights[t],
                "sapo_gate": 4 * p * (1 - p),
                "ppo_kl": row.old[t] - row.x[t],
            }
        )
    return tokens


def weighted_score(row: Row, weight: Callable[[float], float]) -> Tokens:
    """-weight(r) A log pi, the weight without gradient."""
    tokens = []
    for t in range(len(row)):
        ratio = math.exp(row.x0[t] - row.old[t])
        loss = -weight(ratio) * row.advantages[t] * row.x[t] * row.weights[t]
        kept = float(weight(ratio) != ratio)
        tokens.append({"loss": loss, "pg_clipfrac": kept, "ppo_kl": row.old[t] - row.x[t]})
    return tokens


def cispo(row: Row, config: dict[str, Any]) -> Tokens:
    low, high = bounds(config)
    return weighted_score(row, lambda ratio: clip(ratio, 1 - low, 1 + high))


def aipo(row: Row, config: dict[str, Any]) -> Tokens:
    return weighted_score(row, lambda ratio: min(ratio, config["policy_loss"]["aipo_max_ratio"]))


def gpg(row: Row, config: dict[str, Any]) -> Tokens:
    return [
        {"loss": -row.advantages[t] * row.x[t] * row.weights[t], "ppo_kl": row.old[t] - row.x[t]}
        for t in range(len(row))
    ]


def importance_sampling(row: Row, config: dict[str, Any]) -> Tokens:
    return [
        {
            "loss": -row.advantages[t] * math.exp(row.x[t]) / math.exp(row.old[t]) * row.weights[t],
            "ppo_kl": row.old[t] - row.x[t],
        }
        for t in range(len(row))
    ]


def ipo(row: Row, config: dict[str, Any]) -> Tokens:
    settings = config["policy_loss"]
    tokens = []
    for t in range(len(row)):
        far = abs(math.exp(row.x0[t]) - math.exp(row.old[t])) > settings["ipo_eps"]
        loss = 0.0 if far else -row.advantages[t] * math.exp(row.x[t] - row.old[t])
        loss += settings["ipo_kl_tau"] * (row.x[t] - row.old[t]) ** 2
        tokens.append(
            {"loss": loss * row.weights[t], "pg_clipfrac": float(far), "ppo_kl": row.old[t] - row.x[t]}
        )
    return tokens


def dppo(row: Row, config: dict[str, Any], distance: Callable[[float, float], float]) -> Tokens:
    low, high = bounds(config)
    ceiling = config["clip_ratio_c"]
    tokens = []
    for t in range(len(row)):
        p = math.exp(row.x0[t])
        q = math.exp(row.old[t])
        advantage = row.advantages[t]
        far_up = advantage > 0 and p > q and distance(p, q) > high
        far_down = advantage <= 0 and p < q and distance(p, q) > low
        weight = p / q if ceiling is None else min(p / q, ceiling)
        loss = 0.0 if far_up or far_down else -weight * advantage * row.x[t]
        token = {"loss": loss * row.weights[t], "pg_clipfrac": float(far_up or far_down)}
        if ceiling is not None:
            token["pg_clipfrac_lower"] = float(p / q > ceiling and not (far_up or far_down))
        tokens.append(token | {"ppo_kl": row.old[t] - row.x[t]})
    return tokens


def dppo_tv(row: Row, config: dict[str, Any]) -> Tokens:
    return dppo(row, config, lambda p, q: abs(p - q))


def dppo_kl(row: Row, config: dict[str, Any]) -> Tokens:
    return dppo(row, config, lambda p, q: q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))


def dro(row: Row, config: dict[str, Any]) -> Tokens:
    beta = config["policy_loss"]["dro_beta"]
    tokens = []
    for t in range(len(row)):
        moved = row.x[t] - row.old[t]
        loss = -(row.x[t] * row.advantages[t] - beta * moved * moved / 2)
        tokens.append({"loss": loss * row.weights[t], "ppo_kl": -moved})
    return tokens


def dro_sequence(row: Row, config: dict[str, Any]) -> Tokens:
    beta = config["policy_loss"]["dro_beta"]
    rho = sum(row.x) - sum(row.old)
    tokens = []
    for t in range(len(row)):
        log_ratio = row.x[t] - row.old[t]
        penalty = beta / 2 * rho * log_ratio
        tokens.append(
            {
                "loss": (penalty - row.advantages[t] * log_ratio) * row.weights[t],
                "dro_penalty": penalty,
                "ppo_kl": -log_ratio,
            }
        )
    return tokens


def clip_cov(row: Row, config: dict[str, Any]) -> Tokens:
    tokens = vanilla(row, config | {"clip_ratio_c": None})
    for token, chosen in zip(tokens, row.chosen, strict=True):
        token["ppo_clipfrac"] = token["pg_clipfrac"]
        token["pg_clipfrac"] = float(chosen)
        token["loss"] = 0.0 if chosen else token["loss"]
    return tokens


def kl_cov(row: Row, config: dict[str, Any]) -> Tokens:
    tokens = []
    for t in range(len(row)):
        log_ratio = row.x[t] - row.old[t]
        loss = -row.advantages[t] * math.exp(log_ratio)
        if row.chosen[t]:
            loss += config["policy_loss"]["ppo_kl_coef"] * abs(log_ratio)
        tokens.append(
            {
                "loss": loss * row.weights[t],
                "cov_share": float(row.chosen[t]),
                "ppo_kl": abs(log_ratio),
            }
        )
    return tokens


def sft(row: Row, config: dict[str, Any]) -> Tokens:
    return [{"loss": -x, "nll": -x} for x in row.x]


def distillation(row: Row, config: dict[str, Any]) -> Tokens:
    tokens = []
    for t in range(len(row)):
        difference = row.x0[t] - row.teacher[t]
        tokens.append(
            {
                "loss": difference * math.exp(row.x[t] - row.old[t]) * row.weights[t],
                "distillation_kl": row.x[t] - row.teacher[t],
                "ppo_kl": row.old[t] - row.x[t],
            }
        )
    return tokens


SLOW_LOSSES: dict[str, SlowLoss] = {
    fn.__name__: fn
    for fn in (
        vanilla,
        gspo,
        geo_mean,
        sapo,
        cispo,
        aipo,
        ipo,
        dppo_tv,
        dppo_kl,
        dro,
        dro_sequence,
        gpg,
        importance_sampling,
        clip_cov,
        kl_cov,
        sft,
        distillation,
    )
}


def aggregate(rows: list[list[float]], uids: list[Any], mode: str, scale: float) -> float:
    """One number out of the tokens of each row (without those that were not sampled); 0 if there are none."""
    rows_and_uids = [(row, uid) for row, uid in zip(rows, uids, strict=True) if row]
    if not rows_and_uids:
        return 0.0
    every = [value for row, _ in rows_and_uids for value in row]
    if mode == "token-sum":
        return math.fsum(every)
    if mode == "token-mean":
        return math.fsum(every) / len(every)
    if mode == "prompt-mean":
        prompts: dict[Any, list[float]] = {}
        for row, uid in rows_and_uids:
            prompts.setdefault(uid, []).extend(row)
        return math.fsum(math.fsum(tokens) / len(tokens) for tokens in prompts.values()) / len(prompts)
    of_row = {
        "seq-mean-token-sum": math.fsum,
        "seq-mean-token-sum-norm": lambda row: math.fsum(row) / scale,
        "seq-mean-token-mean": lambda row: math.fsum(row) / len(row),
    }[mode]
    return math.fsum(of_row(row) for row, _ in rows_and_uids) / len(rows_and_uids)


def derivatives(loss: SlowLoss, row: Row, config: dict[str, Any], step: float = 1e-5) -> list[list[float]]:
    """[t][s]: central difference of the loss of token s with respect to log-prob t."""
    found = []
    for t in range(len(row)):
        ends = []
        for sign in (1, -1):
            moved = row.x[:t] + [row.x[t] + sign * step] + row.x[t + 1 :]
            ends.append([token["loss"] for token in loss(replace(row, x=moved), config)])
        found.append([(a - b) / (2 * step) for a, b in zip(*ends, strict=True)])
    return found


def candidates_of_clip_cov(rows: list[Row], config: dict[str, Any]) -> set[tuple[int, int]]:
    """(row, number of the sampled token in it) of those that Clip-Cov draws from."""
    settings = config["policy_loss"]
    clipped = [vanilla(row, config | {"clip_ratio_c": None}) for row in rows]
    return {
        (i, t)
        for covariance, (i, t) in covariances(rows)
        if settings["clip_cov_lb"] < covariance < settings["clip_cov_ub"] and not clipped[i][t]["pg_clipfrac"]
    }


def covariances(rows: list[Row]) -> list[tuple[float, tuple[int, int]]]:
    """(log-prob - mean) (advantage - mean) of each token, and its place."""
    places = [(i, t) for i, row in enumerate(rows) for t in range(len(row))]
    if not places:
        return []
    mean_x = math.fsum(rows[i].x[t] for i, t in places) / len(places)
    mean_a = math.fsum(rows[i].advantages[t] for i, t in places) / len(places)
    return [((rows[i].x[t] - mean_x) * (rows[i].advantages[t] - mean_a), (i, t)) for i, t in places]
