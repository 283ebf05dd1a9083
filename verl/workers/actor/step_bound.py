"""A bound on how far one optimizer step may move the policy (`actor.max_step_kl`).

    log-probs of the step's own passes ------------------+
    weights --copy--> before                             v
    weights --optimizer step--> after --pass over some rows--> distance d
                                  d <= bound: keep `after`
                                  d >  bound: before + share * (after - before), measured again

An adaptive optimizer takes a step of about one size whatever the gradient's size, and a few rows can decide
its direction. One such step can unlearn a behaviour that nothing in the batch speaks for. The bound is that
of trust-region methods (TRPO, Schulman et al. 2015, arXiv:1502.05477), which search along a line under a
bound on the KL. The direction stays the optimizer's.

The distance is half the mean squared change of the log-probs of sampled tokens. To second order this is the
KL from the policy that sampled them to the new one (the estimator k2 of
http://joschu.net/blog/kl-approx.html). Changes of either sign count alike, and a single token that has become
likely does not decide the distance, as it does in k3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.workers.engine.training_engine import Engine
from verl.workers.engine.update_loop import MicroBatchLimits, infer_rows

MEASURED_SHARE = 8  # one in this many rows of a mini-batch is measured
MIN_MEASURED_ROWS = 16  # rows that are measured at least, over all replicas, if there are so many
SAFETY = 0.9  # the distance grows about as the square of the step, not exactly
SMALLEST_CUT = 0.1  # the smallest factor on the step in one try
MAX_TRIES = 5


class StepBound:
    """The bound on one optimizer step. Create it before the step's passes, and call `shorten` after the step.

    Args:
        max_kl: the largest distance, in nats per sampled token.
        engine: this rank's share of the policy.
        batch: this rank's columns, [N, R] where they are per token.
        rows: the rows of the mini-batch.
        limits: the limits of a pass.
        temperature: the temperature that the rows were sampled with.
    """

    def __init__(
        self,
        max_kl: float,
        engine: Engine,
        batch: Mapping[str, Tensor],
        rows: Sequence[int],
        limits: MicroBatchLimits,
        temperature: float,
    ) -> None:
        self.max_kl = max_kl
        self.engine = engine
        self.batch = batch
        self.limits = limits
        self.options = {"temperature": temperature, "with_entropy": False}
        self.rows = measured_rows(batch["response_mask"], rows, engine.data.size)
        self._before: list[Tensor] = []
        self._number_of = {row: number for number, row in enumerate(self.rows)}
        self._log_probs = torch.zeros(len(self.rows), batch["response_mask"].shape[1])

    def record_log_probs(self, rows: Tensor, log_probs: Tensor) -> None:
        """Take the log-probs [len(rows), R] that a pass of the step has computed for rows of the batch."""
        for index, row in enumerate(rows.tolist()):
            if row in self._number_of:
                self._log_probs[self._number_of[row]] = log_probs[index].detach().float().cpu()

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Copy this process's share of the weights, just before the optimizer changes them."""
        self._before = [weight.clone() for weight in self.engine.trained_weights()]

    def shorten(self) -> dict[str, float]:
        """Bring the weights within the bound, after the optimizer's step.

        A step that no shortening brings within the bound is undone.

        Returns:
            The metrics: the distance of the optimizer's own step (`actor/step_kl`), and the share of that
            step that was made (`actor/step_share`).
        """
        first = distance = self._distance()
        share = 1.0
        for _ in range(MAX_TRIES):
            if distance <= self.max_kl:
                break
            factor = shorter_by(distance, self.max_kl)
            self._move_back(factor)
            share *= factor
            distance = self._distance()
        if not distance <= self.max_kl:  # also true if the distance is NaN
            self._undo()
            share = 0.0
        self._before = []
        return {"actor/step_kl": first, "actor/step_share": share}

    def _distance(self) -> float:
        """Return the distance to the policy before the step, the same number on every rank."""
        mask = self.batch["response_mask"][self.rows].bool()
        new = infer_rows(self.batch, self.rows, self.engine, self.limits, self.options)[0][self.rows]
        change = (new - self._log_probs)[mask].double()
        total, count = self.engine.reduce([float(change.square().sum()) / 2, float(len(change))], "sum")
        return total / max(count, 1.0)

    @torch.no_grad()
    def _move_back(self, factor: float) -> None:
        """Scale the difference from the weights before the step by `factor`."""
        for weight, before in zip(self.engine.trained_weights(), self._before, strict=True):
            weight.copy_(before + factor * (weight - before))
        self.engine.publish_trained_weights()

    @torch.no_grad()
    def _undo(self) -> None:
        """Restore the weights from before the step."""
        for weight, before in zip(self.engine.trained_weights(), self._before, strict=True):
            weight.copy_(before)
        self.engine.publish_trained_weights()


def measured_rows(response_mask: Tensor, rows: Sequence[int], num_replicas: int) -> list[int]:
    """Return the rows of a mini-batch that the distance is measured on.

    They are evenly spaced, and have sampled tokens. Rows without a gradient are among them, because the loss
    does not see what a step does to them.
    """
    sampled = [row for row in rows if bool(response_mask[row].any())]
    count = max(-(-len(sampled) // MEASURED_SHARE), -(-MIN_MEASURED_ROWS // num_replicas))
    if count >= len(sampled):
        return sampled
    return [sampled[number * len(sampled) // count] for number in range(count)]


def shorter_by(distance: float, max_kl: float) -> float:
    """Return the factor that shortens a step whose distance is larger than `max_kl`.

    The distance grows about as the square of a short step. A distance that is not finite gives the smallest
    factor.
    """
    if not math.isfinite(distance):
        return SMALLEST_CUT
    return max(SMALLEST_CUT, SAFETY * math.sqrt(max_kl / distance))
