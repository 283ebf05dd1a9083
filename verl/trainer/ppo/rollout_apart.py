"""Rollouts on processes of their own, seen from the driver like the actor's own."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup


class RolloutApart:
    """Brings the actor's weights to the rollout processes when they have changed, and generates there.

    Args:
        actor: worker group that sends (`SendsWeights`). rollout: worker group of `RolloutWorker`.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self.actor, self.rollout = actor, rollout
        self._version: int | None = None  # of the weights that are there

    @property
    def world_size(self) -> int:
        """Number of rollout processes."""
        return self.rollout.world_size

    def start_rollout(self, num_rows: int) -> None:
        """Starts the engines, for `num_rows` trajectories of each process, and connects them to the actor."""
        self.rollout.start_rollout(num_rows)
        address, port = self.actor.open_weight_channel()
        joined = self.rollout.join_weight_channel(address, port)
        self.actor.gather_receivers(self.rollout.world_size)
        joined.get()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See `RolloutWorker.generate_sequences`; with the actor's present weights."""
        version = self.actor.weights_version()
        if version != self._version:
            received = self.rollout.receive_weights(version)
            self.actor.send_weights()
            received.get()
            self._version = version
        return self.rollout.generate_sequences(prompts)

    def forget_weights(self) -> None:
        """The actor's weights are others now, whatever their version."""
        self._version = None
