"""The reference policy of the KL term: which model its log-probs come from, and moving it to the policy.

    full training   a frozen engine of its own, which starts as the policy did
    LoRA            the policy's own engine with its adapters off: the base model, no second copy

After `reset` it is the policy as of then (with LoRA: those adapters, kept aside), and part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.workers.engine.checkpoint import load_tensors, save_tensors
from verl.workers.engine.engine import TrainEngine
from verl.workers.engine.loading import PolicyModel

FOLDER = "reference"


class Reference:
    """The reference beside a policy.

    Args:
        policy: the engine that is trained; None in a process that has only the reference.
        own: the reference's own engine; None: the policy's adapters are switched off for it.
    """

    def __init__(self, policy: TrainEngine[PolicyModel] | None, own: TrainEngine[PolicyModel] | None):
        assert own is not None or (policy is not None and policy.adapters is not None)
        self.policy, self.own = policy, own
        self.is_reset = False
        self._kept: dict[str, Tensor] = {}  # with LoRA: the adapters of the last reset

    @contextmanager
    def active(self) -> Iterator[TrainEngine[PolicyModel]]:
        """Gives the engine that computes the reference's log-probs inside of the block."""
        if self.own is not None:
            yield self.own
            return
        assert self.policy is not None and self.policy.adapters is not None
        adapters = self.policy.adapters
        if not self.is_reset:
            with adapters.switched_off():
                yield self.policy
            return
        trained = {name: p.detach().clone() for name, p in adapters.parameters().items()}
        _copy(self._kept, adapters.parameters())
        try:
            yield self.policy
        finally:
            _copy(trained, adapters.parameters())

    def reset(self) -> None:
        """From now on the reference is the policy as it is now."""
        if self.policy is None:
            raise ValueError("the reference can't be reset in a process without the policy (role 'ref').")
        if self.own is not None:
            _copy(dict(self.policy.module.named_parameters()), dict(self.own.module.named_parameters()))
        else:
            assert self.policy.adapters is not None
            self._kept = {n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()}
        self.is_reset = True

    def save(self, folder: Path) -> None:
        """Writes the reference into a checkpoint's folder, if it is not what training started from."""
        if self.is_reset:
            save_tensors(self._tensors(), folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Takes the reference of a checkpoint; without one there, it is what training started from."""
        if (folder / FOLDER).is_dir():
            if self.own is None:
                assert self.policy is not None and self.policy.adapters is not None
                self._kept = {n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()}
            load_tensors(self._tensors(), folder / FOLDER)
            self.is_reset = True
        elif self.is_reset and self.own is not None:
            raise ValueError(
                f"Checkpoint {folder} is of a run whose reference was never reset, but this process has "
                "reset its own; load it in a new process."
            )
        else:
            self.is_reset = False

    def _tensors(self) -> dict[str, Tensor]:
        if self.own is None:
            return self._kept
        return {name: p.detach() for name, p in self.own.module.named_parameters()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
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
