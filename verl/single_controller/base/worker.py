"""Worker, the base of every class that runs in the processes of a WorkerGroup.

A worker learns its place from the environment, which its group sets before making it: RANK, WORLD_SIZE and
LOCAL_RANK, and for more than one process MASTER_ADDR and MASTER_PORT. A TCPStore runs there already, in which
the ranks meet: the group has started it, as torchrun would. Several workers (actor, critic) may live in one
process; they then share its process group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

import torch

from verl.single_controller.base.decorator import DataPosition, register


class Worker:
    """One rank of a distributed job; subclasses call `super().__init__()` first.

    Attributes:
        role_classes: the workers inside a `ColocatedWorker`: role -> class; empty for all others.
        rank: number of this process among those of its group.
        world_size: number of processes in the group.
        local_rank: number of this process on its node.
        mesh_ranks: mesh -> what `_register_dispatch_collect_info` noted for it.
        joined_process_group: whether this worker joined torch.distributed's default process group itself;
            then `close` leaves it.
    """

    role_classes: ClassVar[Mapping[str, type[Worker]]] = {}

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.mesh_ranks: dict[str, tuple[int, bool]] = {}
        self.joined_process_group = False
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"RANK={self.rank} must be at least 0 and below WORLD_SIZE={self.world_size}")

    @register()
    def data_position(self) -> DataPosition:
        """Return which share of the rows this process works on; here it has a share of its own.

        Workers of which several hold one replica of a model override this.
        """
        return DataPosition(self.rank, self.world_size)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Note which rows of a mesh this process works on, and whether its result is collected (verl's)."""
        self.mesh_ranks[mesh_name] = (dp_rank, is_collect)

    @register()
    def mesh_rank(self, mesh_name: str) -> tuple[int, bool]:
        """Return what was noted for a mesh.

        Raises ValueError if the worker has not registered it.
        """
        if mesh_name not in self.mesh_ranks:
            raise ValueError(f"no mesh {mesh_name!r}; the worker has registered {list(self.mesh_ranks)}")
        return self.mesh_ranks[mesh_name]

    def get_device(self, kind: str) -> torch.device:
        """Return this rank's device of a kind, "cpu" or "cuda"."""
        if kind == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ValueError(
                f"rank {self.rank} was told to use {kind!r} but sees no CUDA device; set device=cpu"
            )
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def init_process_group(self, kind: str, timeout_seconds: float = 1800.0) -> torch.device:
        """Join torch.distributed (gloo for "cpu", NCCL for "cuda") and return this rank's device.

        With one process there is no process group to join. A second call, by another worker in the same
        process, changes nothing.
        """
        device = self.get_device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        if self.world_size == 1 or torch.distributed.is_initialized():
            return device
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be set to join {self.world_size} processes")
        timeout = timedelta(seconds=timeout_seconds)
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            store=torch.distributed.TCPStore(address, port, is_master=False, timeout=timeout),
        )
        self.joined_process_group = True
        return device

    def close(self) -> None:
        """Free what the end of the process would not free.

        The group's `shutdown` calls this once. Subclasses may extend it. A process group that somebody else
        has made, such as an engine of vLLM in the same process, stays.
        """
        if self.joined_process_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.joined_process_group = False
