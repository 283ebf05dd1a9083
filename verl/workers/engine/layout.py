"""Which processes of an FSDP2 run hold what: shards of the weights, and shares of the tokens.

    world 8, fsdp_size 4, sequence parallel 2:

    weights sharded over   [0 1 2 3] [4 5 6 7]     the two groups hold the same (hybrid sharding)
    packs shared by        [0 1] [2 3] [4 5] [6 7] four replicas, each with rows of its own

The two are independent: a gradient is summed over all processes, whoever has the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.single_controller.base import DataPosition
from verl.trainer.config.layout_checks import check_divides


@dataclass(frozen=True)
class Layout:
    """Of one model, as one process sees it; None where there is but one process.

    mesh: for `fully_shard`, of one dimension (shard) or two (replicate, shard). data: which replica the
    process is a part of. sequence: the processes of its replica. peers: those with its place in each replica.
    """

    mesh: DeviceMesh | None
    data: DataPosition
    sequence: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None

    @classmethod
    def build(
        cls, device: torch.device, world_size: int, fsdp_size: int = -1, sequence_parallel_size: int = 1
    ) -> Layout:
        """All processes together. fsdp_size: processes that shard the weights among them (-1, or more than
        there are: all); sequence_parallel_size: processes that share a pack's tokens.

        Raises:
            ValueError: one of the two does not divide the number of processes.
        """
        for name, size in (
            ("fsdp_config.fsdp_size", min(fsdp_size, world_size)),
            ("ulysses_sequence_parallel_size", sequence_parallel_size),
        ):
            check_divides(name, size, world_size)
        if world_size == 1:
            return cls(None, DataPosition(0, 1), None, None)
        if fsdp_size < 0 or fsdp_size >= world_size:
            mesh = init_device_mesh(device.type, (world_size,))
        else:
            shape = world_size // fsdp_size, fsdp_size
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        num_replicas = world_size // sequence_parallel_size
        rank, place = divmod(dist.get_rank(), sequence_parallel_size)
        if sequence_parallel_size == 1:
            return cls(mesh, DataPosition(rank, num_replicas), None, dist.group.WORLD)
        groups = init_device_mesh(
            device.type, (num_replicas, sequence_parallel_size), mesh_dim_names=("replica", "sequence")
        )
        data = DataPosition(rank, num_replicas, leads=place == 0)
        return cls(mesh, data, groups["sequence"].get_group(), groups["replica"].get_group())
