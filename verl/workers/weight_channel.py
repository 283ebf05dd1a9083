"""The policy's weights from the processes that train it to rollout processes of their own.

    actor: engine.weights() -> pack -> buckets --broadcast by rank 0 (NCCL, gloo)--> rollout: update_weights

The group spans the actor's rank 0 (rank 0 of it) and all rollout processes. A bucket is bounded, so nobody
holds a second copy of the model on the way, and nothing passes through the driver. The other ranks of the
actor take part in the stream, which gathers what is sharded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from verl.single_controller.base import Dispatch, Execute, Worker, register
from verl.workers.engine.loading import parse_dtype
from verl.workers.engine.precision import Precision
from verl.workers.rollout.vllm.weight_buckets import Group, Meeting, pack


def rollout_dtype(config: DictConfig, device: torch.device) -> torch.dtype:
    """Of rollout processes' weights and computation: `rollout.dtype`, or what the actor computes in.

    config: the `actor_rollout_ref` block.
    """
    computed_in = Precision.from_config(config.actor.fsdp_config, device).compute
    name = config.rollout.dtype
    return computed_in if name == "auto" else parse_dtype(name, computed_in, "rollout.dtype")


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class SendsWeights(Worker):
    """What a process of the actor does for rollout processes that are apart.

    config: the `actor_rollout_ref` block. engine: of the policy (an `Engine`), on `device`.
    """

    config: DictConfig
    engine: Any
    device: torch.device

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def open_weight_channel(self) -> tuple[str, int]:
        """Rank 0 listens for the rollout processes; returns where."""
        self._meeting = Meeting(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        self._num_sent = 0
        return self._meeting.address, self._meeting.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
    def gather_receivers(self, num_receivers: int) -> None:
        """Rank 0 waits until all rollout processes have joined."""
        self._channel = self._meeting.gather(_backend(self.device), self.device, 1 + num_receivers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def weights_version(self) -> int:
        """Number of updates that the weights have had."""
        return self.engine.weights_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self) -> None:
        """Sends all weights, as rollouts compute with them; the receivers must be receiving at the time."""
        with self.engine.loaded(), torch.no_grad():
            if self.rank == 0:
                self._send(rollout_dtype(self.config, self.device))
            else:
                for _ in self.engine.weights():  # gathers each tensor for rank 0
                    pass

    def _send(self, dtype: torch.dtype) -> None:
        """Rank 0: bucket by bucket; the receivers hear of an end in the middle."""
        self._num_sent += 1
        number, end = 0, {}
        try:
            for entries, data in pack(self.engine.weights(), dtype, self.device):
                message = {"bytes": data.numel(), "entries": [vars(entry) for entry in entries]}
                self._channel.announce(self._num_sent, number, message)
                self._channel.start_sending(data).wait()
                number += 1
        except BaseException as error:
            end = {"failed": repr(error)}
            raise
        finally:
            self._channel.announce(self._num_sent, number, end)


class WeightReceiver:
    """A rollout process's end. rank: of this process among `num_receivers` of them."""

    def __init__(self, address: str, port: int, rank: int, num_receivers: int, device: torch.device) -> None:
        """Returns when all have joined and the actor's rank 0 is there."""
        self._channel = Group.join(_backend(device), device, address, port, 1 + rank, 1 + num_receivers)
        self._num_received = 0

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of all weights. RuntimeError if the actor broke off. Read it to its end."""
        self._num_received += 1
        return self._channel.receive(self._num_received)
