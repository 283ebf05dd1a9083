"""The critic: values of states, and their update towards returns. Only states before sampled tokens take
part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import LossDenominator, agg_loss, compute_value_loss
from verl.workers.engine.engine import TrainEngine
from verl.workers.engine.loading import ValueModel
from verl.workers.engine.micro_batches import (
    Averages,
    MicroBatchLimits,
    micro_batches,
    mini_batches,
    rows_per_rank,
    shuffled,
    tensors_of,
)


class DataParallelPPOCritic:
    """Computes and updates values.

    Args:
        config: the `critic` block. engine: this rank's share of the value model.
        limits: micro-batches of the update. forward_limits: micro-batches of compute_values.
        rollout_n: `rollout.n`, which multiplies ppo_mini_batch_size. seed: of `shuffle`, as for the actor.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        engine: TrainEngine[ValueModel],
        limits: MicroBatchLimits,
        forward_limits: MicroBatchLimits,
        rollout_n: int = 1,
        seed: int = 0,
    ):
        self.config, self.engine, self.seed = config, engine, seed
        self.limits, self.forward_limits = limits, forward_limits
        self.mini_batch_rows = rows_per_rank(
            config["ppo_mini_batch_size"], rollout_n, engine.world_size, "critic"
        )

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> Tensor:
        """values [N, R] float32 on CPU: entry t is of the state before responses[:, t], 0 where nothing
        was sampled.
        """
        batch = tensors_of(data)
        values = torch.zeros(batch["response_mask"].shape)
        with self.engine.loaded():
            _, parts = micro_batches(batch, range(len(data)), self.engine, self.forward_limits)
            for part in parts:
                with self.engine.autocast():
                    value = self.engine.module(part)
                if len(part.cells):
                    values[part.rows] = part.unpack(value).cpu()
        return values

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """ppo_epochs passes over the rows, one optimizer step per mini-batch (meta_info `mini_batch_rows` on
        this rank; else as configured). Returns metrics `critic/*`.

        Reads input_ids, attention_mask, position_ids, response_mask, values, returns.
        """
        config, engine = self.config, self.engine
        batch = tensors_of(data, ("values", "returns"))
        mini_batch_rows = data.meta_info.get("mini_batch_rows", self.mini_batch_rows)
        averages, num_skipped = Averages(), 0
        with engine.loaded(optimizer=True):
            for epoch in range(config["ppo_epochs"]):
                parts = mini_batches(len(data), mini_batch_rows)
                if config["shuffle"]:
                    order = shuffled(len(parts), self.seed, engine.num_training_steps, epoch)
                    parts = [parts[i] for i in order]
                for rows in parts:
                    figures = self._accumulate(batch, rows)
                    finite = math.isfinite(figures["critic/vf_loss"])
                    figures["critic/grad_norm"], applied = engine.step(discard=not finite)
                    if applied:
                        averages.add(figures)
                    num_skipped += not applied
        metrics = averages.result() | {
            "critic/lr": engine.lr,
            "critic/num_skipped_updates": float(num_skipped),
        }
        engine.next_lr()
        return metrics

    def _accumulate(self, batch: Mapping[str, Tensor], rows: list[int]) -> dict[str, float]:
        """Gradient of one mini-batch, left in the parameters. Returns metrics, the same on every rank."""
        engine, config = self.engine, self.config
        mask = batch["response_mask"][rows].bool()
        counts = engine.reduce([float(mask.sum()), float(mask.any(dim=1).sum())], "sum")
        denominator = LossDenominator(max(counts[0], 1.0), max(counts[1], 1.0))
        count, parts = micro_batches(batch, rows, engine, self.limits)
        sums = torch.zeros(3, dtype=torch.float64)
        for number, part in enumerate(parts):
            with engine.autocast():
                value = engine.module(part)
            vpreds = part.unpack(value)
            returns, old_values = (batch[key][part.rows].to(engine.device) for key in ("returns", "values"))
            loss, clip_fraction = compute_value_loss(
                vpreds,
                returns,
                old_values,
                part.mask,
                config["cliprange_value"],
                config["loss_agg_mode"],
                denominator,
            )
            engine.backward(loss, is_last=number == count - 1)
            mean = agg_loss(vpreds.detach(), part.mask, "token-mean", denominator)
            sums += torch.stack([loss.detach(), clip_fraction, mean]).double().cpu()
        names = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")
        return dict(zip(names, engine.reduce(sums.tolist(), "sum"), strict=True))
