"""Writing a run's checkpoints, while the run goes on or before it does.

    save(step): workers take snapshots | next step ... commit_if_written() ... | the folder gets its name
                 their threads write  ----------------->

With `trainer.async_checkpoint=false` the workers write before `save` returns. Whichever way, a checkpoint has
its name only when all of it is on disk; what a killed run leaves is an `.incomplete` folder.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.run_state import CheckpointStore, RunStopped
from verl.workers.engine.snapshot import CheckpointFailed

_SECONDS_AFTER_A_FAILURE = 10.0  # that those who write may take; they may be gone, busy, or wait for another


class CheckpointWriting:
    """One checkpoint at a time.

    Args:
        store: where they go. background: whether training goes on while the workers write.
    """

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self.store, self.background = store, background
        self._step: int | None = None  # that is being written
        self._groups: list[WorkerGroup] = []

    def save(self, step: int, groups: Mapping[str, WorkerGroup], beside: Callable[[Path], None]) -> None:
        """Begins the checkpoint of `step`, and ends the one before it.

        groups: folder in the checkpoint -> whose models go there. beside: writes the rest into the folder.

        Raises:
            RunStopped: this one, or the one before it, could not be written.
        """
        self.finish()
        try:
            folder = self.store.begin(step)
            for name, group in groups.items():
                group.save_checkpoint(str(folder / name), self.background)
            beside(folder)
        except (CheckpointFailed, OSError) as error:
            raise self._failed(step, error) from error
        self._step, self._groups = step, list(groups.values())
        if not self.background:
            self.finish()

    def commit_if_written(self) -> None:
        """Gives the checkpoint its name if its files are all there. RunStopped: it could not be written."""
        self._commit(wait=False)

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. RunStopped: as above."""
        self._commit(wait=True)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """A run within: what is being written at its end gets its name, also if the run is stopped
        (RunStopped), and if it fails or is interrupted, where that takes no more than some seconds.
        RunStopped: it could not be written.
        """
        try:
            yield
        except RunStopped:
            self.finish()
            raise
        except BaseException:
            self._finish_after_a_failure()
            raise
        self.finish()

    def _finish_after_a_failure(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                for group in self._groups:
                    group.checkpoint_is_written(True)
                ends.put(None)
            except BaseException as error:  # said below; the run's own error is the one that is raised
                ends.put(error)

        threading.Thread(target=wait, daemon=True).start()
        try:
            error = ends.get(timeout=_SECONDS_AFTER_A_FAILURE)
            if error is None:
                self.store.commit(step)
                return
            why = f"could not be written: {error}"
        except queue.Empty:
            why = f"was not whole within {_SECONDS_AFTER_A_FAILURE:g} s, or its processes are busy"
        except OSError as error:
            why = f"could not be given its name: {error}"
        print(f"note: the checkpoint of step {step} {why}; it is not gone on from", flush=True)

    def _commit(self, wait: bool) -> None:
        step = self._step
        if step is None:
            return
        try:
            written = [done for group in self._groups for done in group.checkpoint_is_written(wait)]
            if all(written):
                self._step = None
                self.store.commit(step)
        except (CheckpointFailed, OSError) as error:
            self._step = None
            raise self._failed(step, error) from error

    def _failed(self, step: int, error: Exception) -> RunStopped:
        kept = self.store.steps()
        origin = f"step {kept[-1]}" if kept else "its beginning, as it has no checkpoint yet"
        return RunStopped(
            f"the checkpoint of step {step} could not be written: {error}. Started again, the run goes on "
            f"from {origin}."
        )
