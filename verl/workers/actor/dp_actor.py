"""The policy's update, and log-probabilities of what was sampled.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

`UpdateLoop` makes the steps, `PolicyObjective` is their loss; here stands what belongs to one training step:
which mini-batch is on-policy, which rows have no gradient, the weight of the entropy bonus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_entropy_controller, policy_loss_inputs
from verl.workers.actor.policy_objective import (
    PolicyObjective,
    loss_columns,
    rows_without_gradient,
    uses_kl_loss,
)
from verl.workers.actor.rollout_agreement import RolloutAgreement, warn_of_worst
from verl.workers.engine.base import Engine
from verl.workers.engine.micro_batches import MicroBatchLimits, micro_batches, tensors_of
from verl.workers.engine.update_loop import MiniBatch, UpdateLoop


def compute_log_prob(
    engine: Engine,
    data: DataProto,
    limits: MicroBatchLimits,
    temperature: float,
) -> Tensor:
    """Log-probs of the response tokens, [N, R] float32 on CPU, 0 where the policy sampled nothing."""
    return token_statistics(engine, data, limits, temperature)["log_probs"]


@torch.no_grad()
def token_statistics(
    engine: Engine,
    data: DataProto,
    limits: MicroBatchLimits,
    temperature: float,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> dict[str, Tensor]:
    """log_probs, and where asked entropys (nats) and sum_pi_squared (of the distribution that the token was
    drawn from), each [N, R] float32 on CPU, 0 where the policy sampled nothing.
    """
    batch = tensors_of(data)
    asked = {
        "temperature": temperature,
        "with_entropy": with_entropy,
        "with_sum_pi_squared": with_sum_pi_squared,
    }
    wanted = {"log_probs": True, "entropys": with_entropy, "sum_pi_squared": with_sum_pi_squared}
    results = {name: torch.zeros(batch["response_mask"].shape) for name, is_on in wanted.items() if is_on}
    with engine.loaded():
        _, parts = micro_batches(batch, range(len(data)), engine, limits)
        for part, outputs in engine.infer(parts, **asked):
            for name, per_token in zip(wanted, outputs, strict=True):
                if name in results and len(part.cells):
                    results[name][part.rows] = part.unpack(per_token).cpu()
    return results


class DataParallelPPOActor:
    """Updates a policy from trajectories with advantages.

    Args:
        config: the `actor_rollout_ref.actor` block. engine: this rank's share of the policy.
        limits: micro-batches of the update. temperature: the one that trajectories were sampled with.
        rollout_n: `rollout.n`, which multiplies ppo_mini_batch_size. seed: of `shuffle`, and of losses that
            choose tokens at random.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        engine: Engine,
        limits: MicroBatchLimits,
        temperature: float,
        rollout_n: int = 1,
        seed: int = 0,
    ):
        self.config, self.engine, self.limits, self.temperature = config, engine, limits, temperature
        self.seed = seed
        self.loop = UpdateLoop("actor", config, engine, limits, rollout_n, seed, config["loss_scale_factor"])
        self.entropy_controller = get_entropy_controller(config)

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """ppo_epochs passes over the rows, one optimizer step per mini-batch (meta_info `mini_batch_rows` on
        this rank; else as configured). Returns metrics `actor/*`, and `rollout_corr/*` where the
        rollout_log_probs have not been compared with anything yet.

        Reads input_ids, attention_mask, position_ids, response_mask, and the columns of `loss_columns`. In
        the first mini-batch the policy is the one that old_log_probs are of, so its ratio is taken as 1 and
        they are not read; but they are with meta_info `bypass_mode`, where they are the rollout engine's.
        They may be missing if there is only one optimizer step, or if the policy loss does without them: with
        several steps there are no figures of the ratio then.
        """
        batch = self._batch(data)
        bypass = bool(data.meta_info.get("bypass_mode", False))
        first_log_probs: Tensor | None = None
        if "rollout_log_probs" in batch and (bypass or "old_log_probs" not in batch):
            first_log_probs = torch.full(batch["response_mask"].shape, torch.nan)
        entropy_coeff = self.entropy_controller.value
        has_ratio = "old_log_probs" in batch or self.loop.num_steps(data) == 1

        def objective_of(mini_batch: MiniBatch) -> PolicyObjective:
            is_first = mini_batch.number == 0
            return PolicyObjective(
                config=self.config,
                engine=self.engine,
                temperature=self.temperature,
                batch=batch,
                mini_batch=mini_batch,
                on_policy=is_first and has_ratio and not bypass,
                entropy_coeff=entropy_coeff,
                idle_rows=rows_without_gradient(self.config, entropy_coeff, batch, mini_batch.rows),
                limits=self.limits,
                seed=(self.seed * 1_000_003 + self.engine.num_training_steps) * 1_009 + mini_batch.number,
                first_log_probs=first_log_probs if is_first else None,
            )

        metrics = self.loop.run(data, batch, objective_of)
        metrics["actor/entropy_coeff"] = entropy_coeff
        if uses_kl_loss(self.config):
            metrics["actor/kl_coef"] = self.config["kl_loss_coef"]
        if "actor/entropy" in metrics:
            self.entropy_controller.update(metrics["actor/entropy"])
        if first_log_probs is not None:
            metrics |= self._agreement(data, batch, first_log_probs)
        return metrics

    def _batch(self, data: DataProto) -> dict[str, Tensor]:
        """The columns that the update reads.

        Raises:
            ValueError: one is missing.
        """
        needed, optional = loss_columns(self.config)
        batch = tensors_of(data, needed, optional)
        if "observation_mask" in batch:  # a row without a sampled token takes part in nothing
            has_tokens = batch["response_mask"].bool().any(dim=1, keepdim=True)
            batch["extra_loss_mask"] = batch["observation_mask"].bool() & has_tokens
        num_steps = self.loop.num_steps(data)
        needs_old = "old_log_prob" in policy_loss_inputs(self.config["policy_loss"]["loss_mode"])
        if needs_old and "old_log_probs" not in batch and num_steps > 1:
            raise ValueError(
                f"update_policy takes {num_steps} optimizer steps on {len(data)} rows, but the batch has no "
                "old_log_probs; call compute_log_prob before the update."
            )
        return batch

    def _agreement(self, data: DataProto, batch: Mapping[str, Tensor], log_probs: Tensor) -> dict[str, float]:
        """Compares the rollout's log-probs with those of the first mini-batch's own pass."""
        seen = batch["response_mask"].bool() & ~log_probs.isnan()
        agreement = RolloutAgreement(batch["rollout_log_probs"], log_probs, seen)
        responses = batch["input_ids"][:, -log_probs.shape[1] :]
        warn_of_worst(agreement.worst(), responses, data.non_tensor_batch.get("uid"))
        return agreement.metrics(self.engine.reduce)

    def state_dict(self) -> dict[str, Any]:
        """What the next training step depends on, besides the engine."""
        return {"loop": self.loop.state_dict(), "entropy_controller": self.entropy_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loop.load_state_dict(state["loop"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])
