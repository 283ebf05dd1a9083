"""One training step of a model, whatever its loss: what the actor and the critic share.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

The model's owner gives an `Objective` for each mini-batch: the loss and the metrics of a micro-batch. Both
are sums over its tokens divided by counts of the whole mini-batch over all ranks, so that loss, gradient and
metrics are the same for every way of splitting it. A step whose loss or gradient is not finite is skipped on
all ranks, counted, and explained: the first trajectory with numbers that are infinite or NaN is looked for
after the fact, which costs a pass for each row if everything that goes into the loss is finite.
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
from verl.protocol import DataProto
from verl.utils.device import to_device
from verl.utils.packing import CPU_TOKENS_PER_PACK, PackedMicroBatch, pack_rows, plan_by_prefix, plan_padded
from verl.utils.turn_rows import TRAJECTORY, rows_of
from verl.workers.engine.base import Engine, Outputs, Share

logger = logging.getLogger(__name__)

PACKING_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")
EXTRA_LOSS_KEY = "extra_loss_mask"
LOSS_MASKS = ("response_mask", EXTRA_LOSS_KEY)


def tensors_of(data: DataProto, keys: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The batch's tensors that packing needs, those of `keys`, and those of `optional` that are there."""
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
    """Most rows and most tokens of a forward pass on one rank (None: no limit), and whether it is padded."""

    max_rows: int | None
    max_tokens: int | None
    padded: bool

    @classmethod
    def from_config(
        cls, block: Mapping[str, Any], prefix: str, device: torch.device, packed: bool, num_sharing: int = 1
    ) -> MicroBatchLimits:
        """`<prefix>_micro_batch_size_per_gpu` rows of a block or, with dynamic batch sizes,
        `<prefix>_max_token_len_per_gpu` tokens. On CPU a pass has at most CPU_TOKENS_PER_PACK tokens besides:
        smaller passes are faster there, and the loss is the same. num_sharing: processes that share a pass's
        tokens; numbers of tokens are for each of them.
        """
        most = CPU_TOKENS_PER_PACK * num_sharing if device.type == "cpu" else None
        if not block["log_prob_use_dynamic_bsz" if prefix == "log_prob" else "use_dynamic_bsz"]:
            return cls(block[f"{prefix}_micro_batch_size_per_gpu"], most, not packed)
        budget = block[f"{prefix}_max_token_len_per_gpu"] * num_sharing
        return cls(None, min(budget, most or budget), not packed)


def pack_micro_batches(
    batch: Mapping[str, Tensor], rows: Sequence[int], engine: Engine, limits: MicroBatchLimits
) -> tuple[int, Iterator[PackedMicroBatch]]:
    """Packs some rows of a batch, those with at least one loss token. Returns (count, micro-batches).

    Loss tokens are those of response_mask and, where the batch has one, of extra_loss_mask ([N, R] bool, see
    `pack_rows`). The count is the same on every rank, since each pass is a collective operation of all: a
    rank that has fewer gets micro-batches without loss tokens. They are built one at a time, as they are
    asked for. Rows that are turns (`verl/utils/turn_rows.py`) stay with those of their trajectory, and limits
    count trajectories: the last turn's row has the others as its beginnings, and is what they all cost. A
    padded pass shares nothing, so there each turn is a row like any other.
    """
    tensors = {key: batch[key] for key in (*PACKING_KEYS, EXTRA_LOSS_KEY) if key in batch}
    masks = [tensors[key] for key in LOSS_MASKS if key in tensors]
    index = torch.as_tensor(rows, dtype=torch.int64)
    index = index[torch.stack([mask[index].any(dim=1) for mask in masks]).any(dim=0)]
    stays_with = batch[TRAJECTORY][index] if TRAJECTORY in batch and not limits.padded else index
    counts = stays_with.unique_consecutive(return_counts=True)[1]
    units = index.split(counts.tolist())
    last = index[counts.cumsum(0) - 1]
    attention = tensors["attention_mask"][last].bool()
    lengths = attention.sum(dim=1).tolist()
    if limits.padded:  # each context is padded to the longest
        longest = (tensors["position_ids"][last] * attention).amax(dim=1) + 1
        contexts = (attention & (tensors["position_ids"][last] == 0)).sum(dim=1).clamp(min=1)
        plan = plan_padded((longest * contexts).tolist(), limits.max_rows, limits.max_tokens)
    else:
        sequences = [x.numpy() for x in tensors["input_ids"][last][attention].split(lengths)]
        plan = plan_by_prefix(sequences, limits.max_rows, limits.max_tokens)
    count = int(engine.reduce([len(plan)], "max")[0])

    def build() -> Iterator[PackedMicroBatch]:
        for micro_batch in plan:
            together = torch.cat([units[unit] for unit in micro_batch])
            yield pack_rows(tensors, together.tolist(), engine.device, limits.padded)
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
    wanted: Sequence[int] = (0,),
) -> list[Tensor]:
    """Outputs of `Engine.infer` for some rows, those of these numbers: each [N, R] float32 on CPU, 0 where
    there is no loss token and in other rows.
    """
    results = [torch.zeros(batch["response_mask"].shape, device=engine.device) for _ in wanted]
    with engine.loaded():
        micro_batches = pack_micro_batches(batch, rows, engine, limits)[1]
        for micro_batch, outputs in engine.infer(micro_batches, **options):
            if len(micro_batch.cells):  # else the pass is for other replicas, and the row is any
                at = to_device(micro_batch.rows, engine.device)
                for result, number in zip(results, wanted, strict=True):
                    result[at] = micro_batch.unpack(outputs[number])
    return [result.cpu() for result in results]


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this rank's rows, its number in the training step (from 0), counts of all ranks."""

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
    def options(self) -> Mapping[str, Any]:
        """What the model is to compute; see `Engine.infer`."""
        ...

    def share(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> Share: ...

    @property
    def step_bound(self) -> StepLimit | None:
        """Return what limits the optimizer step, None for an objective without such a limit."""
        ...


class StepLimit(Protocol):
    """A limit on one optimizer step; `StepBound` of the actor is one."""

    def keep_weights(self) -> None:
        """Remember the weights; the optimizer step comes next."""

    def shorten(self) -> dict[str, float]:
        """Shorten the step that was made, where it is too long; return metrics."""
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
        self.name = name
        self.config = config
        self.limits = limits
        self.seed = seed
        self.loss_scale_factor = loss_scale_factor
        self.mini_batch_rows = rows_per_rank(config["ppo_mini_batch_size"], rollout_n, engine.data.size)
        self.num_skipped_in_a_row = 0
        self.skipped_update = ""  # why, in words, of the last time that one was skipped

    def num_steps(self, data: DataProto) -> int:
        """Return how many optimizer steps `run` makes on these rows."""
        return self.config["ppo_epochs"] * self._num_mini_batches(data)

    def run(
        self, data: DataProto, batch: Mapping[str, Tensor], objective_of: Callable[[MiniBatch], Objective]
    ) -> dict[str, float]:
        """ppo_epochs passes over the rows; returns metrics, the same on every rank.

        Args:
            data: this rank's rows; meta_info `num_mini_batches` says into how many they are divided, the
                same number on every rank (else as many as the configured size makes of this rank's rows), and
                `uid` names them in the log. batch: its tensors, or those of their turns' rows
                (`verl/utils/turn_rows.py`): mini-batches are sets of rows of `data` all the same.
        """
        engine = self.engine
        num_skipped = 0
        of_steps: dict[str, list[float]] = {}  # of each metric, its values in the optimizer steps
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
                        of_steps.setdefault(name, []).append(value)
                else:
                    num_skipped += 1
                    rows = mini_batch.rows
                    names = data.non_tensor_batch.get("uid")
                    if names is not None and TRAJECTORY in batch:
                        names = names[batch[TRAJECTORY].numpy()]
                    self._count_skipped(partial(first_not_finite, engine, batch, rows, objective, names))
        over_steps: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": fmean}
        metrics = {name: over_steps[_op(name)](values) for name, values in of_steps.items()} | {
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
        of_trajectories = mini_batches(len(data), self._num_mini_batches(data))
        # one for all ranks, whose turns may be of other lengths than those here
        scale_factor = self.loss_scale_factor or data.tensors["response_mask"].shape[1]
        for epoch in range(self.config["ppo_epochs"]):
            all_rows = [rows_of(trajectories, batch) for trajectories in of_trajectories]
            if self.config["shuffle"]:
                order = shuffled(len(all_rows), self.seed, self.engine.num_training_steps, epoch)
                all_rows = [all_rows[i] for i in order]
            for rows in all_rows:
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
        """Gradient of one mini-batch, left in the parameters. Returns metrics, the same on every rank; none
        if nothing was computed.

        Idle rows add their metrics alone, without a backward pass; but one of their micro-batches has it if
        there is nothing else: the optimizer steps (momentum, decay) on zeros too. Idle rows come first, so
        that the last pass is a backward one, after which sharded weights are given back.
        """
        engine = self.engine
        shares = list[Share]()
        idle = set(objective.idle_rows)
        active = [row for row in mini_batch.rows if row not in idle]
        num_idle, idle_parts = self._micro_batches(batch, sorted(idle))
        num_active, active_parts = self._micro_batches(batch, active)
        micro_batches = chain(idle_parts, active_parts)
        options = objective.options
        num_backward = num_active or min(num_idle, 1)
        if not num_backward:
            return {}
        for micro_batch, outputs in engine.infer(
            islice(micro_batches, num_idle + num_active - num_backward), **options
        ):
            shares.append(objective.share(micro_batch, outputs))
        shares += engine.forward_backward(micro_batches, num_backward, objective.share, **options)
        values: dict[str, list[Tensor]] = {}
        for share in shares:
            for name, value in (*share.metrics.items(), ("loss", share.loss)):
                values.setdefault(name, []).append(value)
        totals: dict[str, float] = {}
        for op in ("sum", "min", "max"):  # every rank has the same names: each makes as many passes
            names = [name for name in values if _op(name) == op]
            reduced = [float(getattr(torch.stack(values[name]), op)()) for name in names]
            totals |= dict(zip(names, engine.reduce(reduced, op), strict=True))
        return totals

    def _micro_batches(
        self, batch: Mapping[str, Tensor], rows: list[int]
    ) -> tuple[int, Iterable[PackedMicroBatch]]:
        """`pack_micro_batches` of these rows; none where no rank has such rows."""
        if not any(self.engine.reduce([float(len(rows))], "sum")):
            return 0, ()
        return pack_micro_batches(batch, rows, self.engine, self.limits)

    def _count_skipped(self, why: Callable[[], str]) -> None:
        """Counts a step that was not made. The reason costs passes: it is looked for of the first in a row
        alone.
        """
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > 1:
            return
        self.skipped_update = why()
        if self.engine.world_size == 1 or dist.get_rank() == 0:
            logger.warning("%s: an update is skipped: %s", self.name, self.skipped_update)


def _op(name: str) -> str:
    """How a metric's values become one: `*/min` is the least, `*/max` the greatest, others add up (over
    micro-batches and ranks) or are averaged (over optimizer steps).
    """
    ending = name.rsplit("/", 1)[-1]
    return ending if ending in ("min", "max") else "sum"


def mini_batches(num_rows: int, count: int) -> list[range]:
    """Divide rows 0..num_rows-1 into `count` consecutive parts. Sizes differ by at most one, larger first.

    This is the one definition of where mini-batches begin. The driver applies it to the rows of all ranks and
    gives each rank an equal share of every part, rounded up. These shares again differ by at most one and do
    not grow, so a rank that applies it to its own rows finds the same parts.

    Example: 10 rows in 4 parts are rows 0-2, 3-5, 6-7 and 8-9.
    """
    if count == 0:
        return []
    size, num_larger = divmod(num_rows, count)
    starts = [number * size + min(number, num_larger) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def rows_per_rank(mini_batch_size: int, rollout_n: int, world_size: int) -> int:
    """Rows of a mini-batch on one rank: ppo_mini_batch_size * rollout.n trajectories over all, rounded up."""
    return -(-mini_batch_size * rollout_n // world_size)


def shuffled(num_rows: int, seed: int, training_step: int, epoch: int) -> list[int]:
    """A permutation that depends on nothing but the arguments, so that a resumed run draws it again."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + training_step) * 1_009 + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def first_not_finite(
    engine: Engine,
    batch: Mapping[str, Tensor],
    rows: list[int],
    objective: Objective,
    names: np.ndarray | None,
) -> str:
    """What is not finite, in words, the same on every rank; all ranks call it together. rows: this rank's
    rows of the mini-batch. names: uid of each row of the batch.
    """

    def row_name(row: int) -> str:
        rank = f" of rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""
        return f"row {row}{rank}" + ("" if names is None else f" ({names[row]})")

    columns = {name: x for name, x in batch.items() if x.is_floating_point() and x.dim() == 2}
    inputs = ""
    for row in rows if columns else ():
        sampled = batch["response_mask"][row].bool()
        for name, column in columns.items():
            places = (~column[row].isfinite() & sampled).nonzero().flatten().tolist()
            if places and not inputs:
                value = float(column[row, places[0]])
                inputs = f"{name} {value} at place {places[0]} of the response of {row_name(row)}"
    if reason := _over_ranks(engine, inputs):
        return reason
    for micro_batch in pack_micro_batches(batch, rows, engine, MicroBatchLimits(1, None, False))[1]:
        (share,) = engine.forward_backward([micro_batch], 1, objective.share, **objective.options)
        norm, _ = engine.step(discard=True)
        (in_loss,) = engine.reduce([float(not share.loss.isfinite())], "sum")
        if in_loss or not math.isfinite(norm):  # with several ranks: in one of the rows of that pass
            own = row_name(int(micro_batch.rows[0])) if len(micro_batch.cells) else ""
            what = "the loss" if in_loss else "only the gradient"
            return f"{what} is not finite, that of {_over_ranks(engine, own, every=True)}"
    return "the loss or gradient is not finite, though that of each trajectory alone is"


def _over_ranks(engine: Engine, text: str, every: bool = False) -> str:
    """The first rank's text that is not empty, or all of them."""
    if engine.world_size == 1:
        return text
    texts: list[str] = [""] * engine.world_size
    dist.all_gather_object(texts, text if engine.data.leads else "")
    present = [text_of_rank for text_of_rank in texts if text_of_rank]
    return " or ".join(present if every else present[:1])
