"""KL, entropy control, value loss and rollout correction, slowly: from the formulas, token by token in Python
floats. No code is shared with what is tested.

Rows are lists of floats; a mask is a list of rows of 0 and 1, and nothing under a 0 is looked at.
"""

import math


def sampled(values, mask):
    """The sampled entries of each row that has one: [[x, ...], ...]."""
    rows = []
    for row, kept in zip(values, mask, strict=True):
        taken = [x for x, k in zip(row, kept, strict=True) if k]
        if taken:
            rows.append(taken)
    return rows


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def token_mean(values, mask):
    return mean(x for row in sampled(values, mask) for x in row)


def mean_of_row_means(values, mask):
    return mean(mean(row) for row in sampled(values, mask))


def mean_of_row_sums(values, mask):
    return mean(math.fsum(row) for row in sampled(values, mask))


AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": mean_of_row_means,
    "seq-mean-token-sum": mean_of_row_sums,
}


def token_weight(mode, mask, row):
    """How much a sampled token of this row counts in the mean."""
    lengths = [sum(kept) for kept in mask]
    if mode == "token-mean":
        return 1 / sum(lengths)
    num_rows = sum(length > 0 for length in lengths)
    return 1 / num_rows / (lengths[row] if mode == "seq-mean-token-mean" else 1)


def slope(function, x, h=1e-5):
    """The derivative of a function of one number, by central differences."""
    return (function(x + h) - function(x - h)) / (2 * h)


# ---- KL


def kl_value(name, log_p, log_q):
    d = log_p - log_q
    base = name[:-1] if name[-1] == "+" else name
    if base in ("kl", "k1"):
        return d
    if base == "abs":
        return -d if d < 0 else d
    if base in ("mse", "k2"):
        return d * d / 2
    ratio = math.exp(min(max(-d, -20), 20))
    return min(ratio - 1 - min(max(-d, -20), 20) * 1.0, 10.0)


def kl_pull(name, log_p, log_q):
    """What the estimator says its derivative by log_p is: with `+` that of k2, else its own."""
    source = "k2" if name[-1] == "+" else name
    return slope(lambda x: kl_value(source, x, log_q), log_p)


def kl_coefficients(start, target, horizon, steps):
    """The adaptive coefficient after each (measured KL, number of trajectories)."""
    value = start
    seen = []
    for measured, count in steps:
        error = (measured - target) / target
        if error > 0.2:
            error = 0.2
        if error < -0.2:
            error = -0.2
        value = value + value * error * (count / horizon if count < horizon else 1)
        seen.append(value)
    return seen


# ---- entropy


def entropy_weights(start, target, delta, low, high, entropies):
    """The weight of the bonus in each step, given the entropy measured in each."""
    coefficient = start
    weights = []
    last = None
    for entropy in entropies:
        on = last is None or not last > target
        weights.append(coefficient if on else 0.0)
        if entropy != entropy or entropy in (math.inf, -math.inf):
            continue
        if entropy < target:
            coefficient = coefficient + delta
        elif entropy > target:
            coefficient = coefficient - delta
        if coefficient < low:
            coefficient = low
        if coefficient > high:
            coefficient = high
        last = entropy
    return weights


# ---- value


def value_loss_of_token(v, target, old, clip):
    moved = v - old
    if moved > clip:
        moved = clip
    if moved < -clip:
        moved = -clip
    plain = (v - target) ** 2
    clipped = (old + moved - target) ** 2
    return (plain if plain > clipped else clipped) / 2, 1.0 if clipped > plain else 0.0


# ---- rollout correction


def log_ratios(old, rollout, mask):
    """d of each sampled token: [{column: d}, ...], one dictionary per row."""
    return [
        {t: o - r for t, (o, r, k) in enumerate(zip(*row, strict=True)) if k}
        for row in zip(old, rollout, mask, strict=True)
    ]


def truncated(log_ratio, threshold):
    return min(math.exp(min(max(log_ratio, -20.0), 20.0)), threshold)


def weights(old, rollout, mask, level, threshold, counted=None):
    """[N, R] weights, 0 where nothing was sampled; with `counted` (a mask) their mean over it is made 1."""
    rows = log_ratios(old, rollout, mask)
    result = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(rows):
        for t, d in row.items():
            result[i][t] = truncated(math.fsum(row.values()) if level == "sequence" else d, threshold)
    if counted is None:
        return result
    taken = []
    for row, kept in zip(result, counted, strict=True):
        of_row = [w for w, k in zip(row, kept, strict=True) if k]
        taken += of_row[:1] if level == "sequence" else of_row
    factor = mean(taken) if taken else 1.0
    return [[w / factor for w in row] for row in result]


def weight_figures(old, rollout, mask, level, threshold):
    rows = [row for row in log_ratios(old, rollout, mask) if row]
    by_row = level == "sequence"
    of_rows = [[math.fsum(row.values())] if by_row else list(row.values()) for row in rows]
    raw = [math.exp(min(max(d, -20.0), 20.0)) for row in of_rows for d in row]
    repeats = [len(row) if by_row else 1 for row, units in zip(rows, of_rows, strict=True) for _ in units]
    cut = [min(r, threshold) for r, n in zip(raw, repeats, strict=True) for _ in range(n)]  # of each token
    average = mean(cut)
    extremes = raw if by_row else cut
    return {
        "rollout_is_mean": average,
        "rollout_is_std": math.sqrt(mean((w - average) ** 2 for w in cut)),
        "rollout_is_max": max(extremes),
        "rollout_is_min": min(extremes),
        "rollout_is_ratio_fraction_high": mean(r > threshold for r in raw),
        "rollout_is_ratio_fraction_low": mean(r < 1 / threshold for r in raw),
        "rollout_is_eff_sample_size": math.fsum(cut) ** 2 / math.fsum(w * w for w in cut) / len(cut),
    }


def rejected(old, rollout, mask, level, threshold, lower=None):
    """[N, R] of True where a sampled token is out of bounds."""
    low = 1 / threshold if lower is None else lower
    result = [[False] * len(row) for row in mask]
    for i, row in enumerate(log_ratios(old, rollout, mask)):
        for t, d in row.items():
            exponent = {
                "token": d,
                "sequence": math.fsum(row.values()),
                "geometric": math.fsum(row.values()) / len(row),
            }[level]
            result[i][t] = not low <= math.exp(exponent) <= threshold
    return result
