"""The policy's update, and log-probabilities of what was sampled.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

Every loss is a sum over the sampled tokens of a micro-batch divided by counts of the whole mini-batch over
all ranks, so the loss and its gradient are the same for every way of splitting it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import (
    LossDenominator,
    agg_loss,
    compute_entropy_loss,
    kl_penalty,
    policy_loss,
)
from verl.utils.packing import PackedMicroBatch
from verl.workers.actor.rollout_agreement import RolloutAgreement, warn_of_worst
from verl.workers.engine.engine import TrainEngine
from verl.workers.engine.loading import PolicyModel
from verl.workers.engine.micro_batches import (
    Averages,
    MicroBatchLimits,
    micro_batches,
    mini_batches,
    rows_per_rank,
    shuffled,
    tensors_of,
)


@torch.no_grad()
def compute_log_prob(
    engine: TrainEngine[PolicyModel],
    data: DataProto,
    limits: MicroBatchLimits,
    temperature: float,
) -> Tensor:
    """Log-probs of the response tokens, [N, R] float32 on CPU, 0 where the policy sampled nothing."""
    batch = tensors_of(data)
    log_probs = torch.zeros(batch["response_mask"].shape)
    with engine.loaded():
        _, parts = micro_batches(batch, range(len(data)), engine, limits)
        for part in parts:
            with engine.autocast():
                log_prob, *_ = engine.module(part, temperature, False)
            if len(part.cells):
                log_probs[part.rows] = part.unpack(log_prob).cpu()
    return log_probs


class DataParallelPPOActor:
    """Updates a policy from trajectories with advantages.

    Args:
        config: the `actor_rollout_ref.actor` block. engine: this rank's share of the policy.
        limits: micro-batches of the update. temperature: the one that trajectories were sampled with.
        rollout_n: `rollout.n`, which multiplies ppo_mini_batch_size. seed: of `shuffle`, which here puts the
            mini-batches of each epoch in an order of its own (the trainer shuffles the rows).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        engine: TrainEngine[PolicyModel],
        limits: MicroBatchLimits,
        temperature: float,
        rollout_n: int = 1,
        seed: int = 0,
    ):
        self.config, self.engine, self.limits, self.temperature, self.seed = (
            config,
            engine,
            limits,
            temperature,
            seed,
        )
        self.mini_batch_rows = rows_per_rank(
            config["ppo_mini_batch_size"], rollout_n, engine.world_size, "actor_rollout_ref.actor"
        )

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """ppo_epochs passes over the rows, one optimizer step per mini-batch (meta_info `mini_batch_rows` on
        this rank; else as configured). Returns metrics `actor/*`, and
        `rollout_corr/*` if there are rollout_log_probs.

        Reads input_ids, attention_mask, position_ids, response_mask, advantages; old_log_probs, unless
        there is only one optimizer step; ref_log_prob, with use_kl_loss. In the first mini-batch of the
        first epoch the policy is the one that sampled, so its ratio is taken as 1 and old_log_probs are
        not read. Without them, the rollout's log-probs are compared with those of that mini-batch's own
        forward pass.
        """
        config, engine = self.config, self.engine
        wanted = ("advantages", "ref_log_prob") if config["use_kl_loss"] else ("advantages",)
        batch = tensors_of(data, wanted, optional=("old_log_probs", "rollout_log_probs"))
        mini_batch_rows = data.meta_info.get("mini_batch_rows", self.mini_batch_rows)
        self._check_old_log_probs(batch, mini_batch_rows)
        agreement = RolloutAgreement()
        if "old_log_probs" in batch and "rollout_log_probs" in batch:
            all_rows, mask = torch.arange(len(data)), batch["response_mask"].bool()
            agreement.add(batch["rollout_log_probs"], batch["old_log_probs"], mask, all_rows)
        averages, num_skipped = Averages(), 0
        with engine.loaded(optimizer=True):
            for epoch in range(config["ppo_epochs"]):
                parts = mini_batches(len(data), mini_batch_rows)
                if config["shuffle"]:
                    order = shuffled(len(parts), self.seed, engine.num_training_steps, epoch)
                    parts = [parts[i] for i in order]
                for number, rows in enumerate(parts):
                    on_policy = epoch == number == 0
                    figures, loss = self._accumulate(batch, rows, on_policy, agreement)
                    figures["actor/grad_norm"], applied = engine.step(discard=not math.isfinite(loss))
                    if applied:
                        averages.add(figures)
                    num_skipped += not applied
        metrics = averages.result() | {"actor/lr": engine.lr, "actor/num_skipped_updates": float(num_skipped)}
        if config["use_kl_loss"]:
            metrics["actor/kl_coef"] = config["kl_loss_coef"]
        engine.next_lr()
        responses = batch["input_ids"][:, -batch["response_mask"].shape[1] :]
        warn_of_worst(agreement.worst(), responses, data.non_tensor_batch.get("uid"))
        return metrics | agreement.metrics(engine.reduce)

    def _check_old_log_probs(self, batch: Mapping[str, Tensor], mini_batch_rows: int) -> None:
        num_rows = len(batch["response_mask"])
        num_steps = self.config["ppo_epochs"] * -(-num_rows // mini_batch_rows)
        if "old_log_probs" not in batch and num_steps > 1:
            raise ValueError(
                f"update_policy takes {num_steps} optimizer steps on {num_rows} rows, but the batch has no "
                "old_log_probs; call compute_log_prob before the update."
            )

    def _accumulate(
        self, batch: Mapping[str, Tensor], rows: list[int], on_policy: bool, agreement: RolloutAgreement
    ) -> tuple[dict[str, float], float]:
        """Gradient of one mini-batch, left in the parameters. Returns (metrics, loss), the same on every
        rank. `agreement` takes the pass's log-probs if the batch has none of the sampling policy.
        """
        engine = self.engine
        mask = batch["response_mask"][rows].bool()
        counts = engine.reduce([float(mask.sum()), float(mask.any(dim=1).sum())], "sum")
        denominator = LossDenominator(max(counts[0], 1.0), max(counts[1], 1.0))
        count, parts = micro_batches(batch, rows, engine, self.limits)
        sums: dict[str, list[Tensor]] = {}
        extremes: list[Tensor] = []
        for number, part in enumerate(parts):
            loss, figures, ratio_range, log_prob = self._loss(part, batch, denominator, on_policy)
            engine.backward(loss, is_last=number == count - 1)
            if "rollout_log_probs" in batch and "old_log_probs" not in batch:
                rollout = batch["rollout_log_probs"][part.rows].to(engine.device)
                agreement.add(rollout, log_prob, part.mask, part.rows)
            for name, figure in figures.items():
                sums.setdefault(name, []).append(figure)
            extremes.append(ratio_range)
        totals = {name: float(torch.stack(figures).sum()) for name, figures in sums.items()}
        names = list(totals)
        totals = dict(zip(names, engine.reduce([totals[name] for name in names], "sum"), strict=True))
        lowest, highest = torch.stack(extremes).unbind(1) if extremes else (torch.zeros(1), torch.zeros(1))
        totals["actor/ratio/min"] = math.exp(engine.reduce([float(lowest.min())], "min")[0])
        totals["actor/ratio/max"] = math.exp(engine.reduce([float(highest.max())], "max")[0])
        return totals, totals.pop("loss", 0.0)

    def _loss(
        self,
        part: PackedMicroBatch,
        batch: Mapping[str, Tensor],
        denominator: LossDenominator,
        on_policy: bool,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        """A micro-batch's share of the loss, its shares of the metrics, (least, greatest) log-ratio, and the
        log-probs [B, R].
        """
        config, device = self.config, self.engine.device

        def rows_of(key: str) -> Tensor:
            return batch[key][part.rows].to(device)

        with self.engine.autocast():
            per_token, entropy_per_token, _ = self.engine.module(part, self.temperature, True)
        mask = part.mask
        log_prob, entropy = part.unpack(per_token), part.unpack(entropy_per_token)
        old_log_prob = log_prob.detach() if on_policy else rows_of("old_log_probs")
        mode = config["loss_agg_mode"]
        pg_loss, figures = policy_loss(
            "vanilla",
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=rows_of("advantages"),
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
            denominator=denominator,
        )
        weight = config["entropy_coeff"]
        entropy_loss = compute_entropy_loss(entropy if weight else entropy.detach(), mask, mode, denominator)
        loss = pg_loss - weight * entropy_loss
        figures = figures | {"actor/pg_loss": pg_loss, "actor/entropy_loss": entropy_loss}
        if config["use_kl_loss"]:
            kl = kl_penalty(log_prob, rows_of("ref_log_prob"), config["kl_loss_type"])
            figures["actor/kl_loss"] = agg_loss(kl, mask, mode, denominator)
            loss = loss + config["kl_loss_coef"] * figures["actor/kl_loss"]
        figures["loss"] = loss
        log_ratio = (log_prob - old_log_prob).detach().masked_select(mask)
        ratio_range = (
            torch.stack([log_ratio.min(), log_ratio.max()]) if len(log_ratio) else log_prob.new_zeros(2)
        )
        figures = {name: figure.detach() for name, figure in figures.items()}
        return loss, figures, ratio_range, log_prob.detach()
