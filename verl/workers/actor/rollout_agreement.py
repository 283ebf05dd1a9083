"""Whether the rollout engine and the trainer give the sampled tokens the same log-probabilities.

    rollout_log_probs, the trainer's [B, R] --add, per micro-batch--> sums --over ranks--> `rollout_corr/*`

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

_PER_TOKEN = ("log_prob_diff_mean", "kl", "k3_kl", "chi2_token")
_PER_SEQUENCE = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_seq",
)
_GREATEST = ("log_prob_diff_max", "log_ppl_diff_max", "log_ppl_diff_min")  # the last with its sign turned

Reduce = Callable[[Sequence[float], str], list[float]]


class WorstToken(NamedTuple):
    """The token with the greatest difference: its row and column in [N, R], and both log-probs."""

    row: int
    column: int
    rollout: float
    trainer: float


class RolloutAgreement:
    """Sums over the tokens that the policy sampled; the same for every way of splitting the trajectories.

    Example, one trajectory of two tokens, the engine's log-probs [-1.0, -2.0], the trainer's [-1.1, -2.0]: kl
    0.05, log_prob_diff_max 0.1, rollout_log_ppl 1.5, training_log_ppl 1.55, ppl_ratio exp(0.05).
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # float64 [2 + _PER_TOKEN + _PER_SEQUENCE], tokens and sequences first
        self._greatest: list[Tensor] = []  # float64 [3]
        self._worst: list[tuple[Tensor, Tensor]] = []  # rows [B]; float64 [3]: flat index, both log-probs
        self._width = 1

    def add(self, rollout: Tensor, trainer: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Count the tokens of some whole trajectories. Nothing is copied to the host.

        Args:
            rollout, trainer: [B, R] log-probs (nats) of the sampled tokens.
            mask: [B, R] bool, where the policy sampled; nothing else is looked at. rows: [B] int64, which
                rows of the batch these are.
        """
        rollout, trainer = (x.detach().double().masked_fill(~mask, 0.0) for x in (rollout, trainer))
        log_ratio = trainer - rollout
        lengths = mask.sum(dim=1)
        sampled, has_tokens = mask.double(), (lengths > 0).double()
        rollout_log_ppl, training_log_ppl = (-x.sum(dim=1) / lengths.clamp(min=1) for x in (rollout, trainer))
        log_ppl_diff = training_log_ppl - rollout_log_ppl
        per_token = torch.stack(
            [
                sampled,
                log_ratio.abs(),
                -log_ratio,
                log_ratio.expm1() - log_ratio,
                log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul(2).expm1(),
            ]
        )
        per_sequence = torch.stack(
            [
                has_tokens,
                training_log_ppl.exp(),
                training_log_ppl,
                rollout_log_ppl.exp(),
                rollout_log_ppl,
                log_ppl_diff,
                log_ppl_diff.abs(),
                log_ppl_diff.exp(),
                log_ratio.sum(dim=1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul(2).expm1(),
            ]
        )
        self._sums.append(torch.cat([per_token.sum(dim=(1, 2)), (per_sequence * has_tokens).sum(dim=1)]))
        difference = log_ratio.abs().masked_fill(~mask, -torch.inf)
        no_row = lengths == 0
        self._greatest.append(
            torch.stack(
                [
                    difference.max(),
                    log_ppl_diff.masked_fill(no_row, -torch.inf).max(),
                    (-log_ppl_diff).masked_fill(no_row, -torch.inf).max(),
                ]
            )
        )
        worst = difference.argmax()
        both = [worst.double(), rollout.flatten()[worst], trainer.flatten()[worst]]
        self._worst.append((rows, torch.stack(both)))
        self._width = mask.shape[1]

    def worst(self) -> WorstToken | None:
        """The token with the greatest difference on this rank; None if nothing was sampled."""
        if not self._sums or not any(float(part[0]) for part in self._sums):
            return None
        part = int(torch.stack([greatest[0] for greatest in self._greatest]).argmax())
        rows, (index, rollout, trainer) = self._worst[part][0], self._worst[part][1].tolist()
        row, column = divmod(int(index), self._width)
        return WorstToken(int(rows[row]), column, rollout, trainer)

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """`rollout_corr/*`; nothing if no rank sampled anything.

        Args:
            reduce: `TrainEngine.reduce`, (values, "sum" or "max") -> the same over all ranks.
        """
        num_sums = 2 + len(_PER_TOKEN) + len(_PER_SEQUENCE)
        sums = torch.stack(self._sums).sum(dim=0).tolist() if self._sums else [0.0] * num_sums
        greatest = (
            torch.stack(self._greatest).amax(dim=0).tolist()
            if self._greatest
            else [-torch.inf] * len(_GREATEST)
        )
        sums, greatest = reduce(sums, "sum"), reduce(greatest, "max")
        if not sums[0]:
            return {}
        first = 1 + len(_PER_TOKEN)
        means = [total / sums[0] for total in sums[1:first]]
        means += [total / sums[first] for total in sums[first + 1 :]]
        figures = dict(zip((*_PER_TOKEN, *_PER_SEQUENCE), means, strict=True))
        figures |= dict(zip(_GREATEST, greatest, strict=True))
        figures["log_ppl_diff_min"] *= -1
        return {f"rollout_corr/{name}": value for name, value in figures.items()}


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
