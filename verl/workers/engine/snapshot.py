"""Writing a checkpoint while training goes on.

    engine.snapshot(folder) --background--> copy (to CPU memory) --> write (files)
                  training: generation, log-probs, ... | step() waits for the copy, not for the files

The weights stand still from a step's end until the next update, so that nothing is copied by the thread that
trains; and nothing is copied at all where a checkpoint is written at once.
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


def nothing() -> None:
    """What a snapshot of which everything is on disk has left to write."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; says why."""


class Snapshot:
    """The state of something on its way to disk. copy: takes a copy of what may change, so that it may (None:
    there is nothing to copy). write: writes the files; without `copy` before it, the state of then.
    """

    def __init__(self, copy: Callable[[], None] | None = None, write: Callable[[], None] = nothing):
        self._copy = copy or nothing
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
        """Returns when the state may change."""
        self._is_taken.wait()


class BackgroundWriter:
    """A thread that copies and writes snapshots, one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def write(self, snapshots: Sequence[Snapshot], folder: Path, background: bool) -> None:
        """Writes what makes up the checkpoint in `folder`, in this order, and forces it to the disk: before
        it returns or, in the background, later (see `is_done`); all snapshots are copied first then. The
        checkpoint before it must have ended. CheckpointFailed: it could not be written (not in the
        background).
        """
        assert self._written is None or self._written.done()
        all_of_it = [*snapshots, Snapshot(write=partial(sync_tree, folder))]
        if background:
            self._written = self._thread.submit(_write, all_of_it, copies=True)
        else:
            self._written = None
            _write(all_of_it, copies=False)

    def is_done(self, wait: bool) -> bool:
        """Whether nothing is being written (any more). CheckpointFailed: the last one could not be written;
        asked again it answers the same.
        """
        if self._written is None:
            return True
        if not (wait or self._written.done()):
            return False
        self._written.result()
        return True

    def close(self) -> None:
        """Lets what is being written end."""
        self._thread.shutdown(wait=True)


@torch.no_grad()
def _write(snapshots: Sequence[Snapshot], copies: bool) -> None:
    try:
        for snapshot in snapshots if copies else ():
            snapshot.copy()
        for snapshot in snapshots:
            snapshot.write()
    except (Exception, CheckpointException) as error:  # whatever it is, the run must hear of it
        logger.exception("a checkpoint could not be written")
        raise CheckpointFailed(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """In a line; of several ranks' errors the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"rank {rank}: {_reason(error.failures[rank][0])}"
    return f"{type(error).__name__}: {error}"


def copied_to_cpu(state: object) -> object:
    """Nested dictionaries with a copy in CPU memory of each tensor; sharded ones stay sharded alike.

    Other threads go on meanwhile, which `torch.distributed.checkpoint`'s own staging does not let them.
    """
    if isinstance(state, dict):
        return {key: copied_to_cpu(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        names, context = state.__tensor_flatten__()
        pieces = {name: getattr(state, name) for name in names}
        pieces["_local_tensor"] = pieces["_local_tensor"].to("cpu", copy=True)
        return DTensor.__tensor_unflatten__(pieces, context, state.shape, state.stride())
    return state.to("cpu", copy=True) if isinstance(state, Tensor) else state
