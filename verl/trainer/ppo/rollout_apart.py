"""Rollouts on processes of their own, seen from the driver like the actor's own."""

from __future__ import annotations

import math
import queue
import threading
import time

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import WorkerGroup
from verl.single_controller.base.errors import ConnectionLostError, WorkerDiedError

# After an error: until the other group's call says what was behind it.
_SECONDS_TO_EXPLAIN = 5.0
_SECONDS_TO_EXPLAIN_A_LOST_CONNECTION = 45.0  # Ray notices the loss of a node by its silence


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
        _wait_for_all(self.actor.gather_receivers(self.rollout.world_size), joined)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See `RolloutWorker.generate_sequences`; with the actor's present weights."""
        version = self.actor.weights_version()
        if version != self._version:
            received = self.rollout.receive_weights(version)
            _wait_for_all(self.actor.send_weights(), received)
            self._version = version
        return self.rollout.generate_sequences(prompts)

    def forget_weights(self) -> None:
        """The actor's weights are others now, whatever their version."""
        self._version = None


def _wait_for_all(*calls: DataProtoFuture) -> None:
    """Waits for calls of groups that need each other.

    Asked one after the other, the first call could wait for ever for a process of the second one's group. Of
    several errors a death that is known is raised, else that of the earlier call: a sender's before its echo.
    """
    ends: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def wait(index: int) -> None:
        try:
            calls[index].get()
            ends.put((index, None))
        except BaseException as error:  # raised again by the owner of the calls
            ends.put((index, error))

    for index in range(len(calls)):
        threading.Thread(target=wait, args=(index,), daemon=True).start()
    errors: dict[int, BaseException] = {}
    end = math.inf  # of waiting, once there is an error
    for _ in calls:
        try:
            index, error = ends.get(timeout=None if math.isinf(end) else max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if error is None:
            continue
        errors[index] = error
        if _is_known_death(error):
            break
        lost = isinstance(error, ConnectionLostError)
        end = time.monotonic() + (_SECONDS_TO_EXPLAIN_A_LOST_CONNECTION if lost else _SECONDS_TO_EXPLAIN)
    if errors:
        raise min(errors.items(), key=lambda item: (not _is_known_death(item[1]), item[0]))[1]


def _is_known_death(error: BaseException) -> bool:
    return isinstance(error, WorkerDiedError) and not isinstance(error, ConnectionLostError)
