"""Tensors whose memory on the device can be given back for a while; all views of them stay views."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ParkedStorage:
    """The memory behind some tensors, which is on the device or parked.

    Parked memory is in CPU memory, or nowhere.

    Args:
        tensors: any views. Each memory that they lie in is parked as a whole.
        keeps: whether the contents are kept. If not, the memory has zeros after `restore`.
    """

    def __init__(self, tensors: Iterable[Tensor], keeps: bool = True):
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
        self._storages = list(storages.values())
        self.keeps = keeps
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._kept: list[torch.UntypedStorage] = []
        self.is_here = True

    def park(self) -> None:
        """Free the memory. Until `restore`, no code may read the tensors."""
        if not self.is_here:
            return
        for storage in self._storages:
            if self.keeps:
                self._kept.append(torch.UntypedStorage(storage.nbytes()).copy_(storage))
            storage.resize_(0)
        self.is_here = False

    def restore(self) -> None:
        """Allocate the memory again, and fill it with its former contents."""
        if self.is_here:
            return
        for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self.keeps:
                storage.copy_(self._kept[number])
            else:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._kept.clear()
        self.is_here = True
