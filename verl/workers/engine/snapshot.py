"""Writing a checkpoint while training goes on.

    engine.snapshot(folder) --background--> copy (to CPU memory) --> write (files)
                  training: generation, log-probs, ... | step() waits for the copy, not for the files

The weights do not change between a step's end and the next update, so the thread that trains copies nothing.
If a checkpoint is written at once, nothing is copied at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from verl.utils.durable import sync_tree

logger = logging.getLogger(__name__)


def do_nothing() -> None:
    """Do nothing, for a snapshot that has nothing to copy or to write."""


class CheckpointFailed(RuntimeError):
    """The error of a checkpoint that could not be written; its message says why."""


class Snapshot:
    """A state on its way to disk.

    Args:
        copy: copies the part of the state that may change, so that it may change afterwards. None means that
            there is nothing to copy.
        write: writes the files. Without `copy` before it, it writes the state at the time of the call.
    """

    def __init__(self, copy: Callable[[], None] | None = None, write: Callable[[], None] = do_nothing):
        self._copy = copy or do_nothing
        self._write = write
        self._is_taken = threading.Event()
        if copy is None:
            self._is_taken.set()

    def copy(self) -> None:
        try:
            self._copy()
        finally:
            self._is_taken.set()

    def write(self) -> None:
        try:
            self._write()
        finally:
            self._is_taken.set()

    def wait_until_taken(self) -> None:
        """Wait until the state may change."""
        self._is_taken.wait()


class BackgroundWriter:
    """A thread that copies and writes snapshots, one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def write(self, snapshots: Sequence[Snapshot], folder: Path, background: bool) -> None:
        """Write the snapshots of the checkpoint in `folder`, in this order, and force them to the disk.

        With `background` a thread does it later, and copies all snapshots before it writes (see `is_done`).
        Otherwise the checkpoint is on disk when the method returns. The previous checkpoint must have ended.

        Raises CheckpointFailed if the checkpoint could not be written, unless it is written in the
        background.
        """
        assert self._written is None or self._written.done()
        all_snapshots = [*snapshots, Snapshot(write=partial(sync_tree, folder))]
        if background:
            self._written = self._thread.submit(_write, all_snapshots, copies=True)
        else:
            self._written = None
            _write(all_snapshots, copies=False)

    def is_done(self, wait: bool) -> bool:
        """Return whether nothing is being written (any more). With `wait`, wait for the end first.

        Raises CheckpointFailed if the last checkpoint could not be written, also when it is called again.
        """
        if self._written is None:
            return True
        if not (wait or self._written.done()):
            return False
        self._written.result()
        return True

    def close(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        self._thread.shutdown(wait=True)


@torch.no_grad()
def _write(snapshots: Sequence[Snapshot], copies: bool) -> None:
    try:
        for snapshot in snapshots if copies else ():
            snapshot.copy()
        for snapshot in snapshots:
            snapshot.write()
    except (Exception, CheckpointException) as error:  # whatever the error is, the run must learn of it
        logger.exception("a checkpoint could not be written")
        raise CheckpointFailed(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return the reason in one line; of several ranks' errors, that of the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"rank {rank}: {_reason(error.failures[rank][0])}"
    return f"{type(error).__name__}: {error}"


def copied_to_cpu(state: object) -> object:
    """Return nested dictionaries with a copy in CPU memory of each tensor.

    Sharded tensors stay sharded alike. Other threads continue meanwhile, which
    `torch.distributed.checkpoint`'s own staging does not allow.
    """
    if isinstance(state, dict):
        return {key: copied_to_cpu(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        names, context = state.__tensor_flatten__()
        pieces = {name: getattr(state, name) for name in names}
        pieces["_local_tensor"] = pieces["_local_tensor"].to("cpu", copy=True)
        return DTensor.__tensor_unflatten__(pieces, context, state.shape, state.stride())
    return state.to("cpu", copy=True) if isinstance(state, Tensor) else state
