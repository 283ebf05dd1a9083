"""One training step of a model, whatever its loss: the part that the actor and the critic share.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

The model's owner gives an `Objective` for each mini-batch. It computes the loss and the metrics of a
micro-batch. Both are sums over the micro-batch's tokens divided by counts of the whole mini-batch over all
ranks. Loss, gradient and metrics are therefore the same for every way of splitting the mini-batch.

If the loss or the gradient of a step is not finite, all ranks skip the step, count it and report the reason.
For the reason they look for the first trajectory with infinite or NaN numbers after the fact. If everything
that goes into the loss is finite, that search costs one pass for each row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.algos.aggregation import LossDenominator, denominator_counts
from verl.config import Block
from verl.config.policy import Actor
from verl.config.schema import Critic
from verl.packing.packs import CPU_TOKENS_PER_PACK, PackedMicroBatch, pack_rows, plan_by_prefix, plan_padded
from verl.packing.turn_rows import TRAJECTORY, rows_of
from verl.protocol import DataProto
from verl.utils.device import to_device
from verl.workers.engine.training_engine import Engine, MicroBatchLoss, Outputs

logger = logging.getLogger(__name__)

PACKING_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")
EXTRA_LOSS_KEY = "extra_loss_mask"
LOSS_MASKS = ("response_mask", EXTRA_LOSS_KEY)


def tensors_of(data: DataProto, keys: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the batch's tensors that packing needs, those of `keys`, and the existing ones of `optional`.

    Raises ValueError if the batch lacks a tensor that packing needs, or one of `keys`.
    """
    present: dict[str, Any] = dict(data.batch.items()) if data.batch is not None else {}
    wanted = (*PACKING_KEYS, *keys)
    missing = [key for key in wanted if key not in present]
    if missing:
        raise ValueError(
            f"the batch has no {', '.join(missing)}; it has {', '.join(sorted(present)) or 'nothing'}."
        )
    return {key: present[key] for key in (*wanted, *optional) if key in present}


@dataclass(frozen=True)
class MicroBatchLimits:
    """The limits of a forward pass on one rank.

    Attributes:
        max_rows: the largest number of rows. None means no limit.
        max_tokens: the largest number of tokens. None means no limit.
        padded: whether the pass is padded.
        preferred_tokens: the number of tokens at which a pack ends, unless its next row shares a long
            beginning with it (see `plan_by_prefix`). None means that only the other limits end a pack.
    """

    max_rows: int | None
    max_tokens: int | None
    padded: bool
    preferred_tokens: int | None = None

    @classmethod
    def on_device(
        cls,
        device: torch.device,
        max_rows: int | None,
        max_tokens: int | None,
        padded: bool,
        num_token_sharing: int = 1,
    ) -> MicroBatchLimits:
        """Return the limits of passes on a device.

        On CPU smaller passes are faster, and the loss is the same. There packs end at CPU_TOKENS_PER_PACK
        tokens for each of the processes that share them, unless their rows share long beginnings.
        """
        if device.type != "cpu":
            return cls(max_rows, max_tokens, padded)
        preferred_tokens = CPU_TOKENS_PER_PACK * num_token_sharing
        return cls(max_rows, max_tokens, padded, preferred_tokens)

    @classmethod
    def from_config(
        cls,
        block: Block,
        prefix: str,
        device: torch.device,
        padded: bool,
        num_token_sharing: int = 1,
    ) -> MicroBatchLimits:
        """Read the limits from a block of the configuration.

        The limit is `<prefix>_micro_batch_size_per_gpu` rows or, with dynamic batch sizes,
        `<prefix>_max_token_len_per_gpu` tokens.

        Args:
            block: a block of the configuration.
            prefix: the beginning of the keys' names.
            device: the device of the passes.
            padded: whether passes are padded, not packed.
            num_token_sharing: how many processes share the tokens of a pass. The configured numbers of
                tokens are for each of these processes.
        """
        max_rows = None
        max_tokens = None
        if block["log_prob_use_dynamic_bsz" if prefix == "log_prob" else "use_dynamic_bsz"]:
            max_tokens = block[f"{prefix}_max_token_len_per_gpu"] * num_token_sharing
        else:
            max_rows = block[f"{prefix}_micro_batch_size_per_gpu"]
        return cls.on_device(device, max_rows, max_tokens, padded, num_token_sharing)


def pack_micro_batches(
    batch: Mapping[str, Tensor], rows: Sequence[int], engine: Engine, limits: MicroBatchLimits
) -> tuple[int, Iterator[PackedMicroBatch]]:
    """Pack some rows of a batch, those with at least one loss token, into micro-batches.

    Loss tokens are those of `response_mask` and, if the batch has one, of `extra_loss_mask` ([N, R] bool, see
    `pack_rows`).

    Rows that are turns (`verl/packing/turn_rows.py`) stay with the other turns of their trajectory, and
    limits count trajectories. The row of the last turn has the other rows as its beginnings, so it costs as
    much as all of them together. A padded pass shares nothing, so there each turn is a row like any other.

    Returns:
        (count, micro-batches). The count is the same on every rank, because each pass is a collective
        operation of all ranks. A rank with fewer micro-batches gets additional ones without loss tokens. The
        micro-batches are built one at a time, when the iterator reaches them.
    """
    tensors = {key: batch[key] for key in (*PACKING_KEYS, EXTRA_LOSS_KEY) if key in batch}
    masks = [tensors[key] for key in LOSS_MASKS if key in tensors]
    index = torch.as_tensor(rows, dtype=torch.int64)
    index = index[torch.stack([mask[index].any(dim=1) for mask in masks]).any(dim=0)]
    groups = batch[TRAJECTORY][index] if TRAJECTORY in batch and not limits.padded else index
    counts = groups.unique_consecutive(return_counts=True)[1]
    units = index.split(counts.tolist())
    last = index[counts.cumsum(0) - 1]
    attention = tensors["attention_mask"][last].bool()
    lengths = attention.sum(dim=1).tolist()
    if limits.padded:  # each context is padded to the length of the longest one
        longest = (tensors["position_ids"][last] * attention).amax(dim=1) + 1
        contexts = (attention & (tensors["position_ids"][last] == 0)).sum(dim=1).clamp(min=1)
        token_limits = [limit for limit in (limits.max_tokens, limits.preferred_tokens) if limit is not None]
        max_tokens = min(token_limits, default=None)
        plan = plan_padded((longest * contexts).tolist(), limits.max_rows, max_tokens)
    else:
        sequences = [x.numpy() for x in tensors["input_ids"][last][attention].split(lengths)]
        plan = plan_by_prefix(sequences, limits.max_rows, limits.max_tokens, limits.preferred_tokens)
    count = int(engine.reduce([len(plan)], "max")[0])

    def build() -> Iterator[PackedMicroBatch]:
        for micro_batch in plan:
            pack_index = torch.cat([units[unit] for unit in micro_batch])
            yield pack_rows(tensors, pack_index.tolist(), engine.device, limits.padded)
        for _ in range(count - len(plan)):
            row = {key: value[:1] for key, value in tensors.items()}
            without_loss = {key: torch.zeros_like(row[key]) for key in LOSS_MASKS if key in row}
            yield pack_rows(row | without_loss, [0], engine.device)

    return count, build()


@torch.no_grad()
def infer_rows(
    batch: Mapping[str, Tensor],
    rows: Sequence[int],
    engine: Engine,
    limits: MicroBatchLimits,
    options: Mapping[str, Any],
    output_numbers: Sequence[int] = (0,),
) -> list[Tensor]:
    """Return outputs of `Engine.infer` for some rows of a batch.

    Args:
        batch: this rank's tensors.
        rows: the rows that are computed.
        engine: this rank's share of the model.
        limits: the limits of a pass.
        options: the options of `Engine.infer`.
        output_numbers: the numbers of the outputs to return.

    Returns:
        A tensor [N, R] float32 on CPU for each wanted output. It is 0 where there is no loss token, and in
        all other rows.
    """
    results = [torch.zeros(batch["response_mask"].shape, device=engine.device) for _ in output_numbers]
    with engine.loaded():
        micro_batches = pack_micro_batches(batch, rows, engine, limits)[1]
        for micro_batch, outputs in engine.infer(micro_batches, **options):
            # a pass without loss tokens only serves other replicas, and its row is arbitrary
            if len(micro_batch.cells):
                row_index = to_device(micro_batch.rows, engine.device)
                for result, number in zip(results, output_numbers, strict=True):
                    result[row_index] = micro_batch.unpack(outputs[number])
    return [result.cpu() for result in results]


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step.

    Attributes:
        rows: this rank's rows.
        number: the number of the mini-batch in the training step, from 0.
        denominator: counts of the mini-batch over all ranks.
    """

    rows: list[int]
    number: int
    denominator: LossDenominator


class Objective(Protocol):
    """The loss of one mini-batch."""

    @property
    def rows_without_gradient(self) -> Sequence[int]:
        """Return the rows that are known to have no gradient."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Return what the model is to compute; see `Engine.infer`."""
        ...

    def loss_of(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> MicroBatchLoss: ...

    @property
    def step_bound(self) -> StepLimit | None:
        """Return the limit on the optimizer step, or None if the objective has no such limit."""
        ...


class StepLimit(Protocol):
    """A limit on one optimizer step, for example the actor's `StepBound`."""

    def keep_weights(self) -> None:
        """Remember the weights. The optimizer step comes next."""

    def shorten(self) -> dict[str, float]:
        """Shorten the step that was made if it is too long, and return metrics."""
        ...


@dataclass(frozen=True)
class UpdateSchedule:
    """The optimizer steps of a training step.

    Attributes:
        mini_batch_size: rows of the whole run that an optimizer step takes, before `rollout.n`.
        num_epochs: passes over the rows.
        shuffle: whether the mini-batches of each epoch have an order of their own.
    """

    mini_batch_size: int
    num_epochs: int = 1
    shuffle: bool = False

    @classmethod
    def of(cls, block: Actor | Critic) -> UpdateSchedule:
        """Return the schedule of a block of the configuration."""
        return cls(block.ppo_mini_batch_size, block.ppo_epochs, block.shuffle)


class UpdateLoop:
    """The loop that makes the optimizer steps of a training step.

    Args:
        name: "actor", "critic" or "train" (supervised). The metrics' names begin with it.
        schedule: the optimizer steps.
        engine: this rank's share of the model.
        limits: the limits of the update's micro-batches.
        rollout_n: `rollout.n`, which multiplies `ppo_mini_batch_size`.
        seed: the seed of `shuffle`, which gives the mini-batches of each epoch an order of their own. (The
            trainer shuffles the rows.)
        loss_scale_factor: the constant of the loss aggregation seq-mean-token-sum-norm. None means the
            response width.
    """

    def __init__(
        self,
        name: str,
        schedule: UpdateSchedule,
        engine: Engine,
        limits: MicroBatchLimits,
        rollout_n: int,
        seed: int,
        loss_scale_factor: float | None = None,
    ):
        self.engine = engine
        self.name = name
        self.schedule = schedule
        self.limits = limits
        self.seed = seed
        self.loss_scale_factor = loss_scale_factor
        self.mini_batch_rows = rows_per_rank(schedule.mini_batch_size, rollout_n, engine.data.size)
        self.num_skipped_in_a_row = 0
        self.skipped_update = ""  # the reason, in words, why an update was last skipped

    def num_steps(self, data: DataProto) -> int:
        """Return how many optimizer steps `run` makes on these rows."""
        return self.schedule.num_epochs * self._num_mini_batches(data)

    def run(
        self, data: DataProto, batch: Mapping[str, Tensor], objective_of: Callable[[MiniBatch], Objective]
    ) -> dict[str, float]:
        """Make `ppo_epochs` passes over the rows, and return metrics that are the same on every rank.

        Args:
            data: this rank's rows. Their meta_info `num_mini_batches` is the number of mini-batches, which is
                the same on every rank. Without it, the configured mini-batch size determines the number from
                this rank's rows. The column `uid` names the rows in the log.
            batch: the rows' tensors, or the tensors of their turns' rows (`verl/packing/turn_rows.py`). In
                both cases mini-batches are sets of rows of `data`.
            objective_of: maps a mini-batch to its objective.
        """
        engine = self.engine
        num_skipped = 0
        step_values: dict[str, list[float]] = {}  # metric -> its value in each optimizer step
        with engine.loaded(optimizer=True):
            for mini_batch in self._mini_batches(data, batch):
                objective = objective_of(mini_batch)
                metrics = self._accumulate(batch, mini_batch, objective)
                if not metrics:  # no rank has a token to learn from
                    num_skipped += 1
                    self._count_skipped(lambda: "no trajectory of the mini-batch has a token to learn from")
                    continue
                is_finite = math.isfinite(metrics.pop("loss"))
                bound = objective.step_bound
                if bound is not None and is_finite:
                    bound.keep_weights()
                metrics[f"{self.name}/grad_norm"], applied = engine.step(discard=not is_finite)
                if applied and bound is not None:
                    metrics |= bound.shorten()
                if applied:
                    self.num_skipped_in_a_row = 0
                    for name, value in metrics.items():
                        step_values.setdefault(name, []).append(value)
                else:
                    num_skipped += 1
                    rows = mini_batch.rows
                    names = data.non_tensor_batch.get("uid")
                    if names is not None and TRAJECTORY in batch:
                        names = names[batch[TRAJECTORY].numpy()]
                    self._count_skipped(partial(first_not_finite, engine, batch, rows, objective, names))
        reductions: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": fmean}
        metrics = {name: reductions[_reduction_of(name)](values) for name, values in step_values.items()} | {
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

    def _num_mini_batches(self, data: DataProto) -> int:
        """Return how many mini-batches the rows of this rank make."""
        as_configured = -(-len(data) // self.mini_batch_rows)
        return int(data.meta_info.get("num_mini_batches", as_configured))

    def _mini_batches(self, data: DataProto, batch: Mapping[str, Tensor]) -> Iterator[MiniBatch]:
        number = 0
        trajectory_ranges = mini_batches(len(data), self._num_mini_batches(data))
        # the same factor for all ranks, although their turns may have other lengths than the turns here
        scale_factor = self.loss_scale_factor or data.tensors["response_mask"].shape[1]
        for epoch in range(self.schedule.num_epochs):
            rows_of_mini_batches = [rows_of(trajectories, batch) for trajectories in trajectory_ranges]
            if self.schedule.shuffle:
                order = shuffled(len(rows_of_mini_batches), self.seed, self.engine.num_training_steps, epoch)
                rows_of_mini_batches = [rows_of_mini_batches[i] for i in order]
            for rows in rows_of_mini_batches:
                prompt_rows = batch["prompt_rows"][rows] if "prompt_rows" in batch else None
                counts = denominator_counts(batch["response_mask"][rows], prompt_rows)
                denominator = LossDenominator.from_counts(
                    self.engine.reduce(counts, "sum"), scale_factor, batch.get("prompt_tokens")
                )
                yield MiniBatch(rows, number, denominator)
                number += 1

    def _accumulate(
        self, batch: Mapping[str, Tensor], mini_batch: MiniBatch, objective: Objective
    ) -> dict[str, float]:
        """Compute the gradient of one mini-batch, and leave it in the parameters.

        Idle rows add only their metrics, without a backward pass. If no other row has a loss token, one
        micro-batch of idle rows gets a backward pass all the same, because the optimizer's step (momentum,
        decay) is not empty with a gradient of zeros. Idle rows come first, so that the last pass is a
        backward pass, after which sharded weights are freed.

        Returns:
            Metrics that are the same on every rank, or an empty dictionary if nothing was computed.
        """
        engine = self.engine
        losses = list[MicroBatchLoss]()
        idle = set(objective.rows_without_gradient)
        active = [row for row in mini_batch.rows if row not in idle]
        num_idle, idle_batches = self._micro_batches(batch, sorted(idle))
        num_active, active_batches = self._micro_batches(batch, active)
        micro_batches = chain(idle_batches, active_batches)
        options = objective.options
        num_backward = num_active or min(num_idle, 1)
        if not num_backward:
            return {}
        for micro_batch, outputs in engine.infer(
            islice(micro_batches, num_idle + num_active - num_backward), **options
        ):
            losses.append(objective.loss_of(micro_batch, outputs))
        losses += engine.forward_backward(micro_batches, num_backward, objective.loss_of, **options)
        values: dict[str, list[Tensor]] = {}
        for micro_batch_loss in losses:
            for name, value in (*micro_batch_loss.metrics.items(), ("loss", micro_batch_loss.loss)):
                values.setdefault(name, []).append(value)
        totals: dict[str, float] = {}
        # all ranks make the same number of passes, so they have the same names
        for op in ("sum", "min", "max"):
            names = [name for name in values if _reduction_of(name) == op]
            reduced = [float(getattr(torch.stack(values[name]), op)()) for name in names]
            totals |= dict(zip(names, engine.reduce(reduced, op), strict=True))
        return totals

    def _micro_batches(
        self, batch: Mapping[str, Tensor], rows: list[int]
    ) -> tuple[int, Iterable[PackedMicroBatch]]:
        """Pack these rows with `pack_micro_batches`; return no micro-batches if no rank has such rows."""
        if not any(self.engine.reduce([float(len(rows))], "sum")):
            return 0, ()
        return pack_micro_batches(batch, rows, self.engine, self.limits)

    def _count_skipped(self, reason: Callable[[], str]) -> None:
        """Count a step that was not made, and log the reason.

        Finding the reason costs passes, so only the first of several skipped steps in a row is explained.
        """
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > 1:
            return
        self.skipped_update = reason()
        if self.engine.world_size == 1 or dist.get_rank() == 0:
            logger.warning("%s: an update is skipped: %s", self.name, self.skipped_update)


def _reduction_of(name: str) -> str:
    """Return how a metric's values are combined: "min", "max" or "sum".

    The values of `*/min` are reduced to their minimum, those of `*/max` to their maximum. All others are
    added up over micro-batches and ranks, and averaged over optimizer steps.
    """
    ending = name.rsplit("/", 1)[-1]
    return ending if ending in ("min", "max") else "sum"


def mini_batches(num_rows: int, count: int) -> list[range]:
    """Divide rows 0..num_rows-1 into `count` consecutive parts.

    The parts' sizes differ by at most one, and larger parts come first.

    This function is the one definition of where mini-batches begin. The driver applies it to the rows of all
    ranks and gives each rank an equal share of every part, rounded up. These shares again differ by at most
    one and do not grow, so a rank that applies it to its own rows finds the same parts.

    Example: 10 rows in 4 parts are rows 0-2, 3-5, 6-7 and 8-9.
    """
    if count == 0:
        return []
    size, num_larger = divmod(num_rows, count)
    starts = [number * size + min(number, num_larger) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def rows_per_rank(mini_batch_size: int, rollout_n: int, world_size: int) -> int:
    """Return the number of rows of a mini-batch on one rank, rounded up.

    A mini-batch has ppo_mini_batch_size * rollout.n trajectories over all ranks.
    """
    return -(-mini_batch_size * rollout_n // world_size)


def shuffled(num_rows: int, seed: int, training_step: int, epoch: int) -> list[int]:
    """Return a permutation of the rows that depends only on the arguments.

    A resumed run therefore draws the same permutation again.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + training_step) * 1_009 + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def first_not_finite(
    engine: Engine,
    batch: Mapping[str, Tensor],
    rows: list[int],
    objective: Objective,
    names: np.ndarray | None,
) -> str:
    """Describe the first thing that is not finite, in words that are the same on every rank.

    All ranks call it together.

    Args:
        engine: this rank's share of the model.
        batch: this rank's tensors.
        rows: this rank's rows of the mini-batch.
        objective: the objective of the mini-batch.
        names: the uid of each row of the batch.
    """

    def row_name(row: int) -> str:
        rank = f" of rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""
        return f"row {row}{rank}" + ("" if names is None else f" ({names[row]})")

    columns = {name: x for name, x in batch.items() if x.is_floating_point() and x.dim() == 2}
    bad_input = ""
    for row in rows if columns else ():
        sampled = batch["response_mask"][row].bool()
        for name, column in columns.items():
            positions = (~column[row].isfinite() & sampled).nonzero().flatten().tolist()
            if positions and not bad_input:
                value = float(column[row, positions[0]])
                bad_input = f"{name} {value} at place {positions[0]} of the response of {row_name(row)}"
    if reason := _over_ranks(engine, bad_input):
        return reason
    for micro_batch in pack_micro_batches(batch, rows, engine, MicroBatchLimits(1, None, False))[1]:
        (micro_batch_loss,) = engine.forward_backward(
            [micro_batch], 1, objective.loss_of, **objective.options
        )
        norm, _ = engine.step(discard=True)
        (in_loss,) = engine.reduce([float(not micro_batch_loss.loss.isfinite())], "sum")
        if in_loss or not math.isfinite(norm):  # with several ranks, in one of the rows of that pass
            row_here = row_name(int(micro_batch.rows[0])) if len(micro_batch.cells) else ""
            quantity = "the loss" if in_loss else "only the gradient"
            return f"{quantity} is not finite, that of {_over_ranks(engine, row_here, every=True)}"
    return "the loss or gradient is not finite, though that of each trajectory alone is"


def _over_ranks(engine: Engine, text: str, every: bool = False) -> str:
    """Return the first rank's text that is not empty or, with `every`, all texts that are not empty."""
    if engine.world_size == 1:
        return text
    texts: list[str] = [""] * engine.world_size
    dist.all_gather_object(texts, text if engine.data.leads else "")
    present = [text_of_rank for text_of_rank in texts if text_of_rank]
    return " or ".join(present if every else present[:1])
