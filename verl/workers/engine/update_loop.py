"""One training step of a model, whatever its loss: what the actor and the critic share.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

The model's owner gives an `Objective` for each mini-batch: the loss and the figures of a micro-batch. Both
are sums over its tokens divided by counts of the whole mini-batch over all ranks, so that loss, gradient and
figures are the same for every way of splitting it. A step whose loss or gradient is not finite is skipped on
all ranks, counted, and explained (`not_finite.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.algos.aggregation import LossDenominator, denominator_counts
from verl.utils.packing import PackedMicroBatch
from verl.workers.engine.base import Engine, Outputs, Share
from verl.workers.engine.micro_batches import (
    MicroBatchLimits,
    micro_batches,
    mini_batches,
    rows_per_rank,
    shuffled,
)
from verl.workers.engine.not_finite import first_not_finite

logger = logging.getLogger(__name__)

BLOCKS = {"actor": "actor_rollout_ref.actor", "critic": "critic", "train": "data"}


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this rank's rows, its number in the training step (from 0; over all epochs), and
    the counts of all ranks.
    """

    rows: list[int]
    number: int
    denominator: LossDenominator


class Objective(Protocol):
    """The loss of one mini-batch."""

    @property
    def idle_rows(self) -> Sequence[int]:
        """Rows that are known to have no gradient."""
        ...

    @property
    def asked(self) -> Mapping[str, Any]:
        """What the model is asked for; see `Engine.infer`."""
        ...

    def share(self, part: PackedMicroBatch, outputs: Outputs) -> Share: ...

    def token_values(self, part: PackedMicroBatch, outputs: Outputs) -> dict[str, Tensor]:
        """name -> [B, R]: what the loss is made of, each thing before what follows from it."""
        ...


class UpdateLoop:
    """Makes the optimizer steps of a training step.

    Args:
        name: "actor", "critic" or "train" (supervised): the metrics' names begin with it. config: its block.
        engine: this rank's share of the model. limits: micro-batches of the update.
        rollout_n: `rollout.n`, which multiplies ppo_mini_batch_size. seed: of `shuffle`, which here puts the
            mini-batches of each epoch in an order of its own (the trainer shuffles the rows).
        loss_scale_factor: for the loss aggregation seq-mean-token-sum-norm (None: the response width).
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        engine: Engine,
        limits: MicroBatchLimits,
        rollout_n: int,
        seed: int,
        loss_scale_factor: float | None = None,
    ):
        self.engine = engine
        self.name, self.config, self.limits, self.seed = name, config, limits, seed
        self.loss_scale_factor = loss_scale_factor
        self.mini_batch_rows = rows_per_rank(
            config["ppo_mini_batch_size"], rollout_n, engine.data.size, BLOCKS[name]
        )
        self.num_skipped_in_a_row = 0
        self.skipped_update = ""  # why, in words, of the last time that one was skipped

    def num_steps(self, data: DataProto) -> int:
        """Optimizer steps that `run` makes on these rows."""
        return self.config["ppo_epochs"] * len(mini_batches(len(data), self._rows_of_mini_batch(data)))

    def run(
        self,
        data: DataProto,
        batch: Mapping[str, Tensor],
        objective_of: Callable[[MiniBatch], Objective],
    ) -> dict[str, float]:
        """ppo_epochs passes over the rows; returns metrics, the same on every rank.

        Args:
            data: this rank's rows; meta_info `mini_batch_rows` says how many make a mini-batch (else as
                configured), and `uid` names them in the log. batch: its tensors.
        """
        engine, averages, num_skipped = self.engine, _Averages(), 0
        with engine.loaded(optimizer=True):
            for mini_batch in self._mini_batches(batch, self._rows_of_mini_batch(data)):
                objective = objective_of(mini_batch)
                figures = self._accumulate(batch, mini_batch, objective)
                if not figures:  # no rank has a loss token
                    continue
                is_finite = math.isfinite(figures.pop("loss"))
                figures[f"{self.name}/grad_norm"], applied = engine.step(discard=not is_finite)
                if applied:
                    self.num_skipped_in_a_row = 0
                    averages.add(figures)
                else:
                    num_skipped += 1
                    self._skipped(batch, mini_batch, objective, data.non_tensor_batch.get("uid"))
        metrics = averages.result() | {
            f"{self.name}/lr": engine.lr,
            f"{self.name}/num_skipped_updates": float(num_skipped),
            f"{self.name}/num_skipped_in_a_row": float(self.num_skipped_in_a_row),
        }
        engine.next_lr()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped_in_a_row": self.num_skipped_in_a_row, "skipped_update": self.skipped_update}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
        self.skipped_update = state["skipped_update"]

    def _rows_of_mini_batch(self, data: DataProto) -> int:
        return data.meta_info.get("mini_batch_rows", self.mini_batch_rows)

    def _mini_batches(self, batch: Mapping[str, Tensor], size: int) -> Iterator[MiniBatch]:
        number = 0
        for epoch in range(self.config["ppo_epochs"]):
            parts = mini_batches(len(batch["response_mask"]), size)
            if self.config["shuffle"]:
                order = shuffled(len(parts), self.seed, self.engine.num_training_steps, epoch)
                parts = [parts[i] for i in order]
            for rows in parts:
                yield MiniBatch(rows, number, self._denominator(batch, rows))
                number += 1

    def _denominator(self, batch: Mapping[str, Tensor], rows: list[int]) -> LossDenominator:
        prompt_rows = batch["prompt_rows"][rows] if "prompt_rows" in batch else None
        counts = denominator_counts(batch["response_mask"][rows], prompt_rows)
        return LossDenominator.from_counts(
            self.engine.reduce(counts, "sum"), self.loss_scale_factor, batch.get("prompt_tokens")
        )

    def _accumulate(
        self, batch: Mapping[str, Tensor], mini_batch: MiniBatch, objective: Objective
    ) -> dict[str, float]:
        """Gradient of one mini-batch, left in the parameters. Returns figures, the same on every rank; none
        if nothing was computed.

        Idle rows add their figures alone, without a backward pass; but one of their micro-batches has it if
        there is nothing else: the optimizer steps (momentum, decay) on zeros too. They come first, so that
        the last pass is a backward one, after which sharded weights are given back.
        """
        engine, figures = self.engine, _Figures()
        idle = set(objective.idle_rows)
        active = [row for row in mini_batch.rows if row not in idle]
        num_idle, idle_parts = self._micro_batches(batch, sorted(idle))
        num_active, active_parts = self._micro_batches(batch, active)
        parts, asked = chain(idle_parts, active_parts), objective.asked
        num_backward = num_active or min(num_idle, 1)
        if not num_backward:
            return {}
        for part, outputs in engine.infer(islice(parts, num_idle + num_active - num_backward), **asked):
            figures.add(objective.share(part, outputs))
        for share in engine.forward_backward(parts, num_backward, objective.share, **asked):
            figures.add(share)
        return figures.over_ranks(engine)

    def _micro_batches(
        self, batch: Mapping[str, Tensor], rows: list[int]
    ) -> tuple[int, Iterable[PackedMicroBatch]]:
        """`micro_batches`; none where no rank has such rows."""
        if not any(self.engine.reduce([float(len(rows))], "sum")):
            return 0, ()
        return micro_batches(batch, rows, self.engine, self.limits)

    def _skipped(
        self,
        batch: Mapping[str, Tensor],
        mini_batch: MiniBatch,
        objective: Objective,
        names: np.ndarray | None,
    ) -> None:
        """Counts a step that was not made. The first in a row is looked into, which costs more passes."""
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > 1:
            return

        def single_rows() -> Iterator[PackedMicroBatch]:
            return micro_batches(batch, mini_batch.rows, self.engine, MicroBatchLimits(1, None, False))[1]

        self.skipped_update = first_not_finite(self.engine, single_rows, objective, names)
        if self.engine.world_size == 1 or dist.get_rank() == 0:
            logger.warning("%s: an update is skipped: %s", self.name, self.skipped_update)


class _Figures:
    """Figures of a mini-batch, from the shares of its micro-batches."""

    def __init__(self) -> None:
        self._shares: dict[str, list[Tensor]] = {}

    def add(self, share: Share) -> None:
        for name, figure in (*share.figures.items(), ("loss", share.loss)):
            self._shares.setdefault(name, []).append(figure.detach())

    def over_ranks(self, engine: Engine) -> dict[str, float]:
        """Every rank has seen the same names: each of them makes as many passes."""
        totals: dict[str, float] = {}
        for op in ("sum", "min", "max"):
            names = [name for name in self._shares if _op(name) == op]
            reduced = [float(getattr(torch.stack(self._shares[name]), op)()) for name in names]
            totals |= dict(zip(names, engine.reduce(reduced, op), strict=True))
        return totals


class _Averages:
    """Figures of a training step, from those of its optimizer steps."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._values.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        """`*/min` is the least, `*/max` the greatest, anything else the mean of what was added."""
        over_steps: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": fmean}
        return {name: over_steps[_op(name)](values) for name, values in self._values.items()}


def _op(name: str) -> str:
    ending = name.rsplit("/", 1)[-1]
    return ending if ending in ("min", "max") else "sum"
