"""The critic: the values of states before sampled tokens, and their update towards returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from verl.algos.aggregation import agg_loss, compute_value_loss
from verl.config.schema import Critic
from verl.packing.packs import PackedMicroBatch
from verl.protocol import DataProto
from verl.utils.device import to_device
from verl.workers.engine.training_engine import Engine, MicroBatchLoss, Outputs
from verl.workers.engine.update_loop import (
    MicroBatchLimits,
    MiniBatch,
    UpdateLoop,
    UpdateSchedule,
    infer_rows,
    tensors_of,
)


class DataParallelPPOCritic:
    """The values of a critic, and their updates.

    Args:
        config: the `critic` block.
        engine: this rank's share of the value model.
        limits: the limits of the micro-batches, of both values and updates.
        rollout_n: `rollout.n`, which multiplies `ppo_mini_batch_size`.
        seed: the seed of `shuffle`, as for the actor.
    """

    def __init__(
        self,
        config: Critic,
        engine: Engine,
        limits: MicroBatchLimits,
        rollout_n: int = 1,
        seed: int = 0,
    ):
        self.config = config
        self.engine = engine
        self.limits = limits
        self.loop = UpdateLoop("critic", UpdateSchedule.of(config), engine, limits, rollout_n, seed)

    def compute_values(self, data: DataProto) -> Tensor:
        """Return values [N, R] float32 on CPU, of the states before responses[:, t].

        They are 0 where nothing was sampled.
        """
        return infer_rows(tensors_of(data), range(len(data)), self.engine, self.limits, {})[0]

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Update the critic from values and returns [N, R], and return metrics `critic/*`.

        The update is made as the actor's is.
        """
        batch = tensors_of(data, ("values", "returns"))
        return self.loop.run(data, batch, lambda mini: ValueObjective(self.config, self.engine, batch, mini))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next training step depends on, besides the engine."""
        return {"loop": self.loop.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loop.load_state_dict(state["loop"])


@dataclass
class ValueObjective:
    """The critic's loss of one mini-batch; an `Objective` of the update loop.

    Attributes:
        config: the `critic` block.
        engine: this rank's share of the value model.
        batch: this rank's columns.
        mini_batch: the rows and the counts of the mini-batch.
        rows_without_gradient: rows that are known to have no gradient.
    """

    step_bound: ClassVar[None] = None  # the optimizer's steps have no limit
    config: Critic
    engine: Engine
    batch: Mapping[str, Tensor]
    mini_batch: MiniBatch
    rows_without_gradient: Sequence[int] = ()

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def loss_of(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> MicroBatchLoss:
        """Return the micro-batch's share of the loss and of the metrics."""
        vpreds = micro_batch.unpack(outputs[0])
        denominator = self.mini_batch.denominator
        loss, clip_fraction = compute_value_loss(
            vpreds,
            self._rows("returns", micro_batch),
            self._rows("values", micro_batch),
            micro_batch.mask,
            self.config.cliprange_value,
            self.config.loss_agg_mode,
            denominator=denominator,
        )
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": clip_fraction,
            "critic/vpred_mean": agg_loss(
                vpreds.detach(), micro_batch.mask, "token-mean", denominator=denominator
            ),
        }
        return MicroBatchLoss(loss, metrics)

    def _rows(self, key: str, micro_batch: PackedMicroBatch) -> Tensor:
        return to_device(self.batch[key][micro_batch.rows], self.engine.device)
