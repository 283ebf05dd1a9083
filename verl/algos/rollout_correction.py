"""The difference between the log-probs of the rollout engine and of the trainer, and its corrections.

    rollout_log_probs, old_log_probs --apply_rollout_correction--> rollout_is_weights, rejected_mask, metrics
    advantages are computed from all that was sampled
    rejected_mask --mask_rejected_tokens--> response_mask

With d = old_log_prob - rollout_log_prob of a sampled token, its ratio, trainer to engine, is exp(d). It is
not 1 when the engine computes in another precision, sampled with older weights, or never got the weights. The
`rollout_agreement` of a step shows it. There are two remedies, which can be combined:

- weights (`rollout_is`): each token's policy loss is multiplied by a truncated ratio (truncated importance
  sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
- rejection (`rollout_rs`): tokens or rows that are out of bounds are not trained (tokens: IcePop, Ling team
  2025, arXiv:2510.18855; rows: Liu, Li et al. 2025, "When Speed Kills Stability").

A third way needs neither: `bypass_mode` takes the engine's log-probs as the old ones. The ratio of the policy
loss is then that of the trainer's policy to the policy that really sampled, and no pass for old log-probs is
made.

With top-p, top-k or min-p the engine's log-probs are those of the truncated distribution and the trainer's
are not. The agreement then includes that gap too, and the remedies are refused (`check_correction`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.algos.aggregation import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from verl.protocol import DataProto

REJECTION_NAMES = tuple(
    f"{level}_{name}"
    for level, names in (
        ("token", ("k1", "k2", "k3")),
        ("seq_sum", ("k1", "k2", "k3")),
        ("seq_mean", ("k1", "k2", "k3")),
        ("seq_max", ("k2", "k3")),
    )
    for name in names
)
RATIO_NAMES = {"token": "token_k1", "geometric": "seq_mean_k1", "sequence": "seq_sum_k1"}

Reduce = Callable[[Sequence[float], str], list[float]]


def needs_correction(config: Any) -> bool:
    """Return whether the `algorithm.rollout_correction` block asks for weights or rejection.

    Both need old_log_probs.
    """
    return config.rollout_is is not None or config.rollout_rs is not None


def check_correction(config: Any, rollout: Any) -> None:
    """Check the `algorithm.rollout_correction` block against the `actor_rollout_ref.rollout` block.

    Raises ValueError if a name or a threshold of the rejection is wrong, or if the correction would compare a
    truncated distribution with a whole one.
    """
    if config.rollout_rs is not None and config.rollout_rs_threshold is not None:
        rejection_rules(config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower)
    if not needs_correction(config) and not config.bypass_mode:
        return
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    for name, is_on in cuts.items():
        if is_on:
            raise ValueError(
                f"Found actor_rollout_ref.rollout.{name}={getattr(rollout, name)} with algorithm."
                "rollout_correction, which would compare the engine's truncated distribution with the "
                "trainer's whole one; sample without top_p, top_k and min_p, or turn the correction off."
            )


def apply_rollout_correction(batch: DataProto, config: Any) -> dict[str, float]:
    """Add what the correction needs to the batch.

    Call it before the advantages are computed, with every row of the step in the batch.

    Reads rollout_log_probs, old_log_probs, response_mask [N, R]. Writes, as far as `config` (the
    `algorithm.rollout_correction` block) asks for it:

    - rollout_is_weights [N, R] float32, 0 where nothing was sampled;
    - rejected_mask [N, R] bool;
    - old_log_probs, in bypass mode.

    Both remedies look at every sampled token. If both are on, the batch mean of the weights is taken over the
    tokens that are not rejected.

    Returns:
        `rollout_corr/*`: how far engine and trainer agree, and the metrics of the remedies. In bypass mode,
        or without old_log_probs, the dictionary is empty, because the actor then measures the agreement.
    """
    tensors = batch.tensors
    if "rollout_log_probs" not in tensors:
        if config.bypass_mode or needs_correction(config):
            raise ValueError(
                "algorithm.rollout_correction needs rollout_log_probs, which this batch does not have; use a "
                "rollout engine that returns them, or turn the correction off."
            )
        return {}
    rollout = tensors["rollout_log_probs"]
    mask = tensors["response_mask"].bool()
    if config.bypass_mode:
        tensors["old_log_probs"] = rollout
        return {}
    if "old_log_probs" not in tensors:
        if needs_correction(config):
            raise ValueError("algorithm.rollout_correction needs old_log_probs; call compute_log_prob first.")
        return {}
    old = tensors["old_log_probs"]
    metrics = rollout_agreement(rollout, old, mask)
    rejected = torch.zeros_like(mask)
    if config.rollout_rs is not None:
        bounds = (config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower)
        rejected, new_metrics = rejection_mask(old, rollout, mask, *bounds)
        tensors["rejected_mask"] = rejected
        metrics |= new_metrics
    if config.rollout_is is not None:
        accepted = mask & ~rejected if config.rollout_is_batch_normalize else None
        tensors["rollout_is_weights"], new_metrics = importance_weights(
            old, rollout, mask, config.rollout_is, config.rollout_is_threshold, accepted
        )
        metrics |= new_metrics
    return metrics


def mask_rejected_tokens(batch: DataProto) -> None:
    """Take rejected tokens out of `response_mask`; call it after the advantages are computed.

    The order matters, because a rejected row is a fair sample of the policy that rolled out: its reward
    belongs into its group's baseline, and into the returns of its own accepted tokens. (verl rejects before.)
    From then on a rejected token takes part in nothing: not in the policy loss, the entropy bonus, the KL or
    the critic, nor in the counts that they are divided by.

    The batch keeps what was sampled as `sampled_mask` [N, R], for metrics of lengths. If the batch has
    neither a `rejected_mask` nor a `stale_mask` (of rollouts ahead of training), nothing changes.
    """
    tensors = batch.tensors
    masks: list[Any] = [tensors.pop(name) for name in ("rejected_mask", "stale_mask") if name in tensors]
    if not masks:
        return
    rejected = torch.stack([mask.bool() for mask in masks]).any(dim=0)
    tensors["sampled_mask"] = tensors["response_mask"]
    tensors["response_mask"] = tensors["response_mask"].masked_fill(rejected, 0)


def _log_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return d [N, R] float64, 0 where nothing was sampled."""
    difference = old_log_prob.detach().double() - rollout_log_prob.detach().double()
    return difference.masked_fill(~mask, 0.0)


def importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    level: str,
    threshold: float,
    normalize_over: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute truncated importance weights: (weights [N, R] float32 without gradient, metrics).

    With `token`, each sampled token has w = min(exp(d), threshold), which has little variance and some bias.
    With `sequence`, every token of a row has w = min(exp(sum of the row's d), threshold). Before the
    truncation this is what the theory asks for, but its variance grows with the length. d (or its sum) is
    limited to [-20, 20] first.

    Args:
        old_log_prob: [N, R] of the trainer.
        rollout_log_prob: [N, R] of the engine.
        response_mask: [N, R], 1 where the policy sampled the token.
        level: token | sequence.
        threshold: the greatest value of a weight.
        normalize_over: [N, R] bool. The weights are divided, after the truncation, so that their mean over
            these tokens (over the rows of these tokens, for `sequence`) is 1. None means no division.

    Returns:
        The weights and the metrics. The metrics are as in verl 0.9.1, but rows without a token don't count:

        - rollout_is_mean, _std and _eff_sample_size, 1 / mean((w / mean w)^2), over tokens, whose w is that
          of their row for `sequence`;
        - rollout_is_max and _min of w over tokens (for `sequence`: of the ratio before truncation over rows);
        - rollout_is_ratio_fraction_high and _low, the share of tokens (rows) whose ratio is above `threshold`
          and below 1 / threshold;
        - rollout_is_batch_norm_factor, the mean that was divided by.
    """
    mask = response_mask.bool()
    ratios = _log_ratio(old_log_prob, rollout_log_prob, mask)
    units = mask  # the tokens [N, R], or the rows [N, 1], that have a weight of their own
    if level == "sequence":
        ratios = ratios.sum(dim=1, keepdim=True)
        units = mask.any(dim=1, keepdim=True)
    raw = ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = raw.clamp(max=threshold)
    metrics: dict[str, float] = {}
    if mask.any():
        tokens = weights.expand(mask.shape)[mask]
        ratio = raw[units]
        extremes = tokens if level == "token" else ratio
        values = {
            "mean": tokens.mean(),
            "std": tokens.std(unbiased=False),
            "max": extremes.max(),
            "min": extremes.min(),
            "ratio_fraction_high": (ratio > threshold).double().mean(),
            "ratio_fraction_low": (ratio < 1 / threshold).double().mean(),
            "eff_sample_size": 1 / (tokens / tokens.mean()).square().mean(),
        }
        metrics = {f"rollout_corr/rollout_is_{name}": float(value) for name, value in values.items()}
    if normalize_over is not None:
        counted = normalize_over if level == "token" else normalize_over.any(dim=1, keepdim=True)
        factor = float(weights[counted].mean()) if counted.any() else 1.0
        weights = weights / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    return weights.expand(mask.shape).masked_fill(~mask, 0.0).float(), metrics


class RejectionRule(NamedTuple):
    """A rule that accepts a token where lower <= value <= upper.

    Attributes:
        level: token, seq_sum, seq_mean or seq_max.
        value: k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - 1 - d of the token. With the levels seq_sum, seq_mean
            and seq_max it is the sum, mean or maximum over all tokens of the row.
        lower: the least accepted value.
        upper: the greatest accepted value.
    """

    level: str
    value: str
    lower: float
    upper: float


def rejection_rules(
    rollout_rs: str, threshold: float | str | None, threshold_lower: float | None = None
) -> list[RejectionRule]:
    """Return the rules that `algorithm.rollout_correction.rollout_rs` and its thresholds stand for.

    `rollout_rs` has one of two forms:

    - verl's names (token_k1, seq_mean_k3, ...; see `REJECTION_NAMES`), separated by commas. Each of them must
      accept a token. `threshold` holds their thresholds, one for all or one for each, separated by commas.
      For k1 a threshold gives the bounds of the ratio of engine to trainer as "0.5_5.0" (one number u is
      1/u_u), for the others the greatest value.
    - `token`, `geometric` (a row's mean) or `sequence` (a row's sum): k1 with `threshold` and
      `threshold_lower` as bounds of the ratio of trainer to engine (lower None: 1 / threshold; 0: no bound).

    Raises:
        ValueError: there is no such name, or a threshold does not fit it.
    """
    names = [name.strip() for name in rollout_rs.split(",")]
    texts = [text.strip() for text in str(threshold).split(",")]
    texts = texts * len(names) if len(texts) == 1 else texts
    if threshold is None or len(texts) != len(names):
        raise ValueError(
            f"rollout_rs_threshold: found {threshold!r} for rollout_rs={rollout_rs!r}; expected one "
            "threshold, or one for each name, with commas."
        )
    rules = []
    for name, text in zip(names, texts, strict=True):
        if name not in RATIO_NAMES and name not in REJECTION_NAMES:
            expected = ", ".join((*RATIO_NAMES, *REJECTION_NAMES))
            raise ValueError(f"rollout_rs: found {name!r}, expected one or more of {expected}.")
        level, _, value = RATIO_NAMES.get(name, name).rpartition("_")
        takes_two = value == "k1" and name not in RATIO_NAMES
        try:
            numbers = [float(number) for number in text.split("_")]
        except ValueError:
            numbers = []
        counts = (1, 2) if takes_two else (1,)
        if len(numbers) not in counts or numbers != sorted(numbers) or numbers[0] <= 0:
            raise ValueError(
                f"rollout_rs_threshold: found {text!r} for rollout_rs={name}, expected a number above 0"
                + (', or two of them, the lower one first, like "0.5_5.0".' if takes_two else ".")
            )
        lower = -math.inf
        upper = numbers[-1]
        if value == "k1":
            upper = math.log(numbers[-1])
            lower = math.log(numbers[0]) if len(numbers) == 2 else -upper
        if name in RATIO_NAMES and threshold_lower is not None:
            upper = -math.log(threshold_lower) if threshold_lower else math.inf
        rules.append(RejectionRule(level, value, lower, upper))
    return rules


def rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_rs: str,
    threshold: float | str | None,
    threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the tokens that any of the `rejection_rules` rejects, [N, R] bool, and metrics.

    A rule for rows rejects all tokens of a row or none.

    The metrics are rollout_rs_masked_fraction, the rejected share of the sampled tokens, and
    rollout_rs_seq_masked_fraction, the share of rows with a token that lost at least one. (verl divides the
    latter by all rows.)
    """
    mask = response_mask.bool()
    log_ratio = _log_ratio(old_log_prob, rollout_log_prob, mask)
    rejected = torch.zeros_like(mask)
    for rule in rejection_rules(rollout_rs, threshold, threshold_lower):
        values = -log_ratio
        if rule.value != "k1":
            bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            values = bounded.square() / 2 if rule.value == "k2" else bounded.expm1() - bounded
        if rule.level == "seq_max":
            values = values.amax(dim=1, keepdim=True)  # k2 and k3 are 0 where nothing was sampled
        elif rule.level != "token":
            values = values.sum(dim=1, keepdim=True)
        if rule.level == "seq_mean":
            values = values / mask.sum(dim=1, keepdim=True).clamp(min=1)
        rejected |= ((values < rule.lower) | (values > rule.upper)) & mask
    rows = mask.any(dim=1)
    if not rows.any():
        return rejected, {}
    return rejected, {
        "rollout_corr/rollout_rs_masked_fraction": float(rejected[mask].double().mean()),
        "rollout_corr/rollout_rs_seq_masked_fraction": float(rejected.any(dim=1)[rows].double().mean()),
    }


def rollout_agreement(
    rollout: Tensor, trainer: Tensor, mask: Tensor, reduce: Reduce | None = None
) -> dict[str, float]:
    """Return `rollout_corr/*`: how far engine and trainer agree on some trajectories.

    Names and definitions of the metrics are those of verl's rollout correction; `log_prob_diff_mean` and
    `_max` (absolute, per token) are ours. `kl` and `k3_kl` estimate KL(rollout || trainer) by k1 and k3 of
    Schulman 2020, "Approximating KL Divergence". Log-ratios that are squared are limited to [-20, 20], so
    that chi2_* stay finite.

    Args:
        rollout: [N, R] log-probs (nats) of the sampled tokens by the engine.
        trainer: [N, R] log-probs (nats) of the sampled tokens by the trainer.
        mask: [N, R] bool, where the policy sampled; nothing else is looked at.
        reduce: `Engine.reduce`, which maps (values, "sum" or "max") to the same over all ranks, each of which
            has rows of its own. None: these are all rows.

    Returns:
        The metrics by name, or an empty dictionary if nothing was sampled.

    Example: one trajectory of two tokens, with the engine's log-probs [-1.0, -2.0] and the trainer's [-1.1,
    -2.0], has kl 0.05, log_prob_diff_max 0.1, rollout_log_ppl 1.5, training_log_ppl 1.55, ppl_ratio
    exp(0.05).
    """
    rows = mask.any(dim=1)
    mask = mask[rows]
    rollout, trainer = (x.detach()[rows].double().masked_fill(~mask, 0.0) for x in (rollout, trainer))
    # The log-ratio is 0 where nothing was sampled.
    log_ratio = trainer - rollout
    lengths = mask.sum(dim=1)
    rollout_log_ppl, training_log_ppl = (-x.sum(dim=1) / lengths for x in (rollout, trainer))
    log_ppl_diff = training_log_ppl - rollout_log_ppl
    per_token = {  # means over tokens
        "log_prob_diff_mean": log_ratio.abs(),
        "kl": -log_ratio,
        "k3_kl": log_ratio.expm1() - log_ratio,
        "chi2_token": _chi2(log_ratio),
    }
    per_row = {  # means over rows
        "training_ppl": training_log_ppl.exp(),
        "training_log_ppl": training_log_ppl,
        "rollout_ppl": rollout_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
        "chi2_seq": _chi2(log_ratio.sum(dim=1)),
    }
    greatest = {
        "log_prob_diff_max": log_ratio.abs().flatten(),
        "log_ppl_diff_max": log_ppl_diff,
        "log_ppl_diff_min": -log_ppl_diff,
    }
    sums = [float(values.sum()) for values in (mask, lengths > 0, *per_token.values(), *per_row.values())]
    maxima = [float(values.max()) if len(values) else -torch.inf for values in greatest.values()]
    if reduce is not None:
        sums = reduce(sums, "sum")
        maxima = reduce(maxima, "max")
    num_tokens, num_rows, *sums = sums
    if not num_tokens:
        return {}
    divisors = [num_tokens] * len(per_token) + [num_rows] * len(per_row)
    means = [total / divisor for total, divisor in zip(sums, divisors, strict=True)]
    metrics = dict(zip((*per_token, *per_row, *greatest), [*means, *maxima], strict=True))
    metrics["log_ppl_diff_min"] *= -1
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _chi2(log_ratio: Tensor) -> Tensor:
    """Return ratio^2 - 1."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul(2).expm1()
