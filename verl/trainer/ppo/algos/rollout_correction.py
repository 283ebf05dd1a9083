"""Correction for a rollout engine that gives the tokens other probabilities than the trainer does.

    rollout_log_probs, old_log_probs --apply_rollout_correction--> rollout_is_weights, rejected_mask, metrics
    advantages are computed from all that was sampled
    rejected_mask --take_out_rejected--> response_mask

With d = old_log_prob - rollout_log_prob of a sampled token, its ratio is exp(d), trainer to engine. It is not
1 when the engine computes in another precision, or sampled with older weights. Two remedies, alone or
together:

- weights (`rollout_is`): each token's policy loss is multiplied by a truncated ratio (truncated importance
  sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
- rejection (`rollout_rs`): tokens or rows whose ratio is out of bounds are not trained (tokens: IcePop, Ling
  team 2025, arXiv:2510.18855; rows by product or geometric mean: Liu, Li et al. 2025, "When Speed Kills
  Stability").

A third way needs neither: `bypass_mode` takes the engine's log-probs as the old ones. The ratio of the policy
loss is then that of the trainer's policy to the policy that really sampled, and no pass for old log-probs is
made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LOG_RATIO_LIMIT
from verl.workers.actor.rollout_agreement import RolloutAgreement, warn_of_worst

if TYPE_CHECKING:
    from verl.protocol import DataProto


def corrects(config: Mapping[str, Any]) -> bool:
    """Whether weights or rejection are asked for: they need old log-probs of the trainer's own.

    Args:
        config: the `algorithm.rollout_correction` block.
    """
    return config["rollout_is"] is not None or config["rollout_rs"] is not None


def apply_rollout_correction(batch: DataProto, config: Mapping[str, Any]) -> dict[str, float]:
    """Adds what the correction needs to the batch; to be called before the advantages, with every row of the
    step in the batch.

    Reads rollout_log_probs, old_log_probs, response_mask [N, R]. Writes, as far as `config` (the
    `algorithm.rollout_correction` block) asks for it:
        rollout_is_weights [N, R] float32, 0 where nothing was sampled; rejected_mask [N, R] bool;
        old_log_probs, in bypass mode.
    Both remedies look at every sampled token; with both, the weights' batch mean is that of what is kept.

    Returns:
        `rollout_corr/*`: how far engine and trainer agree (see `RolloutAgreement`), and the figures of the
        remedies. In bypass mode, or without old_log_probs, nothing: the actor measures the agreement then.
    """
    tensors = batch.tensors
    if "rollout_log_probs" not in tensors:
        if config["bypass_mode"] or corrects(config):
            raise ValueError(
                "algorithm.rollout_correction needs rollout_log_probs, which this batch does not have; use a "
                "rollout engine that returns them, or turn the correction off."
            )
        return {}
    rollout, mask = tensors["rollout_log_probs"], tensors["response_mask"].bool()
    if config["bypass_mode"]:
        tensors["old_log_probs"] = rollout
        return {}
    if "old_log_probs" not in tensors:
        if corrects(config):
            raise ValueError(
                "algorithm.rollout_correction needs old_log_probs; call compute_log_prob before."
            )
        return {}
    old = tensors["old_log_probs"]
    agreement = RolloutAgreement(rollout, old, mask)
    warn_of_worst(agreement.worst(), tensors["responses"], batch.non_tensor_batch.get("uid"))
    metrics = agreement.metrics(lambda values, op: list(values))
    rejected = torch.zeros_like(mask)
    if config["rollout_rs"] is not None:
        rejected, figures = rejection_mask(
            old,
            rollout,
            mask,
            config["rollout_rs"],
            config["rollout_rs_threshold"],
            config["rollout_rs_threshold_lower"],
        )
        tensors["rejected_mask"] = rejected
        metrics |= figures
    if config["rollout_is"] is not None:
        weights, figures = importance_weights(
            old,
            rollout,
            mask,
            config["rollout_is"],
            config["rollout_is_threshold"],
            normalize_over=mask & ~rejected if config["rollout_is_batch_normalize"] else None,
        )
        tensors["rollout_is_weights"] = weights
        metrics |= figures
    return metrics


def take_out_rejected(batch: DataProto) -> None:
    """Takes rejected tokens out of `response_mask`; to be called after the advantages.

    After, because a rejected row is a fair sample of the policy that rolled out: its reward belongs into its
    group's baseline, and into the returns of its own kept tokens. (verl rejects before.) From then on a
    rejected token takes part in nothing: policy loss, entropy bonus, KL, critic, or what they are divided by.
    The batch keeps what was sampled as `sampled_mask` [N, R], for figures of lengths. Without a
    `rejected_mask` nothing changes.
    """
    tensors = batch.tensors
    if "rejected_mask" not in tensors:
        return
    rejected = tensors.pop("rejected_mask")
    tensors["sampled_mask"] = tensors["response_mask"]
    tensors["response_mask"] = tensors["response_mask"].masked_fill(rejected, 0)


def _log_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """d [N, R] float64, 0 where nothing was sampled."""
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
    """Truncated importance weights: (weights [N, R] float32 without gradient, metrics).

    `token`: w = min(exp(d), threshold) of each sampled token: little variance, some bias. `sequence`: every
    token of a row has w = min(exp(sum of the row's d), threshold): what the theory asks for before it is
    truncated, but its variance grows with the length. d (or its sum) is limited to [-20, 20] first.

    Args:
        level: token | sequence.
        threshold: what a weight is at most.
        normalize_over: [N, R] bool; divide the weights so that their mean over these tokens (over these rows,
            for `sequence`) is 1, after the truncation. None: don't.

    Metrics, over tokens (over rows with a token, for `sequence`): rollout_is_max and _min before truncation;
    _mean, _std after it; rollout_is_ratio_fraction_high and _low, the share above `threshold` and below
    1 / threshold; rollout_is_eff_sample_size, 1 / mean((w / mean w)^2), a share from 0 to 1;
    rollout_is_batch_norm_factor, the mean that was divided by.
    """
    mask = response_mask.bool()
    ratios = _log_ratio(old_log_prob, rollout_log_prob, mask)
    units = mask  # what has a weight of its own: tokens [N, R], or rows [N, 1]
    if level == "sequence":
        ratios, units = ratios.sum(dim=1, keepdim=True), mask.any(dim=1, keepdim=True)
    raw = ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = raw.clamp(max=threshold)
    metrics = _weight_metrics(raw[units], weights[units], threshold)
    if normalize_over is not None:
        kept = normalize_over if level == "token" else normalize_over.any(dim=1, keepdim=True)
        factor = float(weights[kept].mean()) if kept.any() else 1.0
        weights = weights / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    return weights.expand(mask.shape).masked_fill(~mask, 0.0).float(), metrics


def _weight_metrics(raw: Tensor, weights: Tensor, threshold: float) -> dict[str, float]:
    if not len(raw):
        return {}
    mean = weights.mean()
    figures = {
        "mean": mean,
        "std": weights.std(unbiased=False),
        "max": raw.max(),
        "min": raw.min(),
        "ratio_fraction_high": (raw > threshold).double().mean(),
        "ratio_fraction_low": (raw < 1 / threshold).double().mean(),
        "eff_sample_size": 1 / (weights / mean).square().mean(),
    }
    return {f"rollout_corr/rollout_is_{name}": float(value) for name, value in figures.items()}


def rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    level: str,
    threshold: float,
    threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """What is out of bounds: ([N, R] bool, metrics).

    A ratio is kept when threshold_lower <= ratio <= threshold (both compared as logarithms).
    `token`: each token's exp(d). `geometric`: the row's exp(mean of d), all or none of its tokens.
    `sequence`: the row's exp(sum of d), their product.

    Args:
        threshold: above 1. threshold_lower: None is 1 / threshold; 0 is no lower bound.

    Metrics: rollout_rs_masked_fraction, of sampled tokens; rollout_rs_seq_masked_fraction, of rows with a
    token: those that lost at least one.
    """
    mask = response_mask.bool()
    ratios = _log_ratio(old_log_prob, rollout_log_prob, mask)
    if level != "token":
        ratios = ratios.sum(dim=1, keepdim=True)
    if level == "geometric":
        ratios = ratios / mask.sum(dim=1, keepdim=True).clamp(min=1)
    upper = math.log(threshold)
    lower = -upper if threshold_lower is None else math.log(threshold_lower) if threshold_lower else -math.inf
    rejected = ((ratios < lower) | (ratios > upper)).expand(mask.shape) & mask
    rows = mask.any(dim=1)
    if not rows.any():
        return rejected, {}
    return rejected, {
        "rollout_corr/rollout_rs_masked_fraction": float(rejected[mask].double().mean()),
        "rollout_corr/rollout_rs_seq_masked_fraction": float(rejected.any(dim=1)[rows].double().mean()),
    }
