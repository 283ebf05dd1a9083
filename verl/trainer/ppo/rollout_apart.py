"""Rollouts on processes of their own, seen from the driver like the actor's own."""

from __future__ import annotations

import contextlib
import queue
import threading

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import WorkerGroup
from verl.single_controller.base.errors import ConnectionLostError

_SECONDS_TO_MISS_A_NODE = 45.0  # after a lost connection: until the other group's call knows whose end it was


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
        _wait_for_all(joined, self.actor.gather_receivers(self.rollout.world_size))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See `RolloutWorker.generate_sequences`; with the actor's present weights."""
        version = self.actor.weights_version()
        if version != self._version:
            received = self.rollout.receive_weights(version)
            _wait_for_all(received, self.actor.send_weights())
            self._version = version
        return self.rollout.generate_sequences(prompts)

    def forget_weights(self) -> None:
        """The actor's weights are others now, whatever their version."""
        self._version = None


def _wait_for_all(*calls: DataProtoFuture) -> None:
    """Waits for calls of groups that need each other; raises the first error of any, or one that explains it.

    Asked one after the other, the first call could wait for ever for a process of the second one's group.
    """
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def wait(call: DataProtoFuture) -> None:
        try:
            call.get()
            ends.put(None)
        except BaseException as error:  # raised again by the owner of the calls
            ends.put(error)

    for call in calls:
        threading.Thread(target=wait, args=(call,), daemon=True).start()
    for num_left in reversed(range(len(calls))):
        error = ends.get()
        if error is None:
            continue
        if isinstance(error, ConnectionLostError) and num_left:
            with contextlib.suppress(queue.Empty):
                error = ends.get(timeout=_SECONDS_TO_MISS_A_NODE) or error
        raise error
