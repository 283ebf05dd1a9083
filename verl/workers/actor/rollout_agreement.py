"""Whether the rollout engine and the trainer give the sampled tokens the same log-probabilities.

    rollout_log_probs, the trainer's [N, R] --RolloutAgreement--> sums --over ranks--> `rollout_corr/*`

The trainer learns from tokens as if it had sampled them itself. What the engine says of them differs by
rounding, by older weights, or by a mistake such as weights that never arrived; these figures show it. They
are taken once a step: by the driver from old log-probs (`apply_rollout_correction`, which can also mend what
they show), or by the actor in its first pass where there are none.

Names and definitions are those of verl's rollout correction; `log_prob_diff_mean` and `_max` (absolute, per
token) are ours. `kl` and `k3_kl` estimate KL(rollout || trainer) by k1 and k3 of Schulman 2020,
"Approximating KL Divergence". Log-ratios that are squared are limited to [-20, 20], so that chi2_* stay
finite.

With top-p, top-k or min-p the engine's log-probs are those of the truncated distribution and the trainer's
are not: the figures then hold that gap too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LOG_RATIO_LIMIT

logger = logging.getLogger(__name__)

WORST_DIFFERENCE = 1.0  # nats: rounding in bfloat16 stays well below, weights that did not arrive well above

Reduce = Callable[[Sequence[float], str], list[float]]


class WorstToken(NamedTuple):
    """The token with the greatest difference: its row and column in [N, R], and both log-probs."""

    row: int
    column: int
    rollout: float
    trainer: float


class RolloutAgreement:
    """The figures of some trajectories; every rank has its own, and `metrics` puts them together.

    Args:
        rollout, trainer: [N, R] log-probs (nats) of the sampled tokens.
        mask: [N, R] bool, where the policy sampled; nothing else is looked at.

    Example, one trajectory of two tokens, the engine's log-probs [-1.0, -2.0], the trainer's [-1.1, -2.0]: kl
    0.05, log_prob_diff_max 0.1, rollout_log_ppl 1.5, training_log_ppl 1.55, ppl_ratio exp(0.05).
    """

    def __init__(self, rollout: Tensor, trainer: Tensor, mask: Tensor) -> None:
        rows = mask.any(dim=1)
        self._mask = mask[rows]
        self._rows = rows.nonzero().flatten()
        self._rollout, self._trainer = (
            x.detach()[rows].double().masked_fill(~self._mask, 0.0) for x in (rollout, trainer)
        )
        self._log_ratio = self._trainer - self._rollout

    def worst(self) -> WorstToken | None:
        """The token with the greatest difference on this rank; None if nothing was sampled."""
        if not len(self._rows):
            return None
        index = int(self._log_ratio.abs().masked_fill(~self._mask, -torch.inf).argmax())
        row, column = divmod(index, self._mask.shape[1])
        rollout, trainer = (float(x[row, column]) for x in (self._rollout, self._trainer))
        return WorstToken(int(self._rows[row]), column, rollout, trainer)

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """`rollout_corr/*`; nothing if no rank sampled anything.

        Args:
            reduce: `TrainEngine.reduce`, (values, "sum" or "max") -> the same over all ranks.
        """
        per_token, per_sequence, greatest = self._figures()
        counts = [float(self._mask.sum()), float(len(self._rows))]
        sums = [float(values.sum()) for values in (*per_token.values(), *per_sequence.values())]
        most = [float(values.max()) if len(values) else -torch.inf for values in greatest.values()]
        (num_tokens, num_sequences, *sums), most = reduce([*counts, *sums], "sum"), reduce(most, "max")
        if not num_tokens:
            return {}
        divisors = [num_tokens] * len(per_token) + [num_sequences] * len(per_sequence)
        means = [total / divisor for total, divisor in zip(sums, divisors, strict=True)]
        figures = dict(zip((*per_token, *per_sequence, *greatest), [*means, *most], strict=True))
        figures["log_ppl_diff_min"] *= -1
        return {f"rollout_corr/{name}": value for name, value in figures.items()}

    def _figures(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """name -> values of which it is the mean over tokens, the mean over sequences, the greatest."""
        log_ratio = self._log_ratio  # 0 where nothing was sampled, as are the values made of it
        lengths = self._mask.sum(dim=1)
        rollout_log_ppl, training_log_ppl = (-x.sum(dim=1) / lengths for x in (self._rollout, self._trainer))
        log_ppl_diff = training_log_ppl - rollout_log_ppl
        per_token = {
            "log_prob_diff_mean": log_ratio.abs(),
            "kl": -log_ratio,
            "k3_kl": log_ratio.expm1() - log_ratio,
            "chi2_token": _chi2(log_ratio),
        }
        per_sequence = {
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
        return per_token, per_sequence, greatest


def _chi2(log_ratio: Tensor) -> Tensor:
    """ratio^2 - 1"""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul(2).expm1()


def warn_of_worst(worst: WorstToken | None, token_ids: Tensor, names: np.ndarray | None) -> None:
    """A log line if engine and trainer can't have had the same weights and context for some token.

    Args:
        token_ids: [N, R] int64, the responses. names: [N] of str, the trajectories, if they have any.
    """
    if worst is None or abs(worst.rollout - worst.trainer) <= WORST_DIFFERENCE:  # NaN is worth a line
        return
    logger.warning(
        "rollout engine and trainer disagree: log-probs %.3f and %.3f of token %d, place %d of the response "
        "of trajectory %s",
        worst.rollout,
        worst.trainer,
        int(token_ids[worst.row, worst.column]),
        worst.column,
        worst.row if names is None else names[worst.row],
    )
