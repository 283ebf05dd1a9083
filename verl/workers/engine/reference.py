"""The reference policy of the KL term: its model, and how the policy becomes the reference.

    full training   a frozen engine of its own, which starts with the policy's weights
    LoRA            the policy's own engine with its adapters off: the base model, no second copy

`reset` makes the policy of that moment the reference. With LoRA, it keeps a copy of the adapters. A reference
that was reset is part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from verl.workers.engine.checkpoint import copy_tensors, load_tensors, save_tensors
from verl.workers.engine.training_engine import Engine

FOLDER = "reference"


class Reference:
    """The reference of a policy.

    Args:
        policy: the engine that is trained.
        own_engine: the reference's own engine. None means that the policy's engine computes the reference,
            with its adapters switched off.
    """

    def __init__(self, policy: Engine, own_engine: Engine | None):
        assert own_engine is not None or policy.adapters is not None
        self.policy = policy
        self.own_engine = own_engine
        self.is_reset = False
        self._adapters_at_reset: dict[str, Tensor] = {}  # with LoRA: a copy of the adapters at the last reset

    @contextmanager
    def active(self) -> Iterator[Engine]:
        """Yield the engine that computes the reference's log-probs inside the block."""
        if self.own_engine is not None:
            yield self.own_engine
            return
        adapters = self.policy.adapters
        assert adapters is not None
        if not self.is_reset:
            with adapters.switched_off():
                yield self.policy
            return
        self.policy.wait_for_snapshot()  # a snapshot must see the trained adapters
        trained = {name: p.detach().clone() for name, p in adapters.parameters().items()}
        copy_tensors(self._adapters_at_reset, adapters.parameters())
        try:
            yield self.policy
        finally:
            copy_tensors(trained, adapters.parameters())

    def reset(self) -> None:
        """Make the present policy the reference."""
        if self.own_engine is not None:
            self.own_engine.copy_weights(self.policy)
        else:
            assert self.policy.adapters is not None
            self._adapters_at_reset = {
                n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()
            }
        self.is_reset = True

    def save(self, folder: Path) -> None:
        """Write the reference into a checkpoint's folder, if it was reset."""
        if self.is_reset and self.own_engine is not None:
            self.own_engine.save_weights(folder / FOLDER)
        elif self.is_reset:
            save_tensors(self._adapters_at_reset, folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Load the reference of a checkpoint.

        If the checkpoint has none, the reference stays the policy that training started from.
        """
        if (folder / FOLDER).is_dir():
            if self.own_engine is not None:
                self.own_engine.load_weights(folder / FOLDER)
            else:
                assert self.policy.adapters is not None
                self._adapters_at_reset = {
                    n: p.detach().clone() for n, p in self.policy.adapters.parameters().items()
                }
                load_tensors(self._adapters_at_reset, folder / FOLDER)
            self.is_reset = True
