"""The reference policy of the KL term: which model its log-probs come from, and moving it to the policy.

    full training   a frozen engine of its own, which starts as the policy did
    LoRA            the policy's own engine with its adapters off: the base model, no second copy

After `reset` it is the policy as of then (with LoRA: those adapters, kept aside), and part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from verl.workers.engine.base import Engine
from verl.workers.engine.checkpoint import copy_tensors, load_tensors, save_tensors

FOLDER = "reference"


class Reference:
    """The reference beside a policy, which is the engine that is trained. own: the reference's own engine;
    None: the policy's adapters are switched off for it.
    """

    def __init__(self, policy: Engine, own: Engine | None):
        assert own is not None or policy.adapters is not None
        self.policy = policy
        self.own = own
        self.is_reset = False
        self._kept: dict[str, Tensor] = {}  # with LoRA: the adapters of the last reset

    @contextmanager
    def active(self) -> Iterator[Engine]:
        """Gives the engine that computes the reference's log-probs inside of the block."""
        if self.own is not None:
            yield self.own
            return
        adapters = self.policy.adapters
        assert adapters is not None
        if not self.is_reset:
            with adapters.switched_off():
                yield self.policy
            return
        self.policy.wait_for_snapshot()  # which is of the trained adapters
        trained = {name: p.detach().clone() for name, p in adapters.parameters().items()}
        copy_tensors(self._kept, adapters.parameters())
        try:
            yield self.policy
        finally:
            copy_tensors(trained, adapters.parameters())

    def reset(self) -> None:
        """From now on the reference is the policy as it is now."""
        if self.own is not None:
            self.own.copy_weights(self.policy)
        else:
            assert self.policy.adapters is not None
            self._kept = {n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()}
        self.is_reset = True

    def save(self, folder: Path) -> None:
        """Writes the reference into a checkpoint's folder, if it is not what training started from."""
        if self.is_reset and self.own is not None:
            self.own.save_weights(folder / FOLDER)
        elif self.is_reset:
            save_tensors(self._kept, folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Takes the reference of a checkpoint; without one there, it stays what training started from."""
        if (folder / FOLDER).is_dir():
            if self.own is not None:
                self.own.load_weights(folder / FOLDER)
            else:
                assert self.policy.adapters is not None
                self._kept = {n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()}
                load_tensors(self._kept, folder / FOLDER)
            self.is_reset = True
