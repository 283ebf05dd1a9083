"""Copies between models of the same parameters, however either is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Each rank copies its shards; dtypes, devices and which ranks shard may differ."""
    assert source.keys() == target.keys()
    for name, tensor in target.items():
        _local(tensor).copy_(_local(_sharded_like(source[name], tensor)))


def _sharded_like(source: Tensor, target: Tensor) -> Tensor:
    if not (isinstance(source, DTensor) and isinstance(target, DTensor)):
        return source
    if source.device_mesh.shape == target.device_mesh.shape:
        return source
    return distribute_tensor(source.full_tensor(), target.device_mesh, target.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
