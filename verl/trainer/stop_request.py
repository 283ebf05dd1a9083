"""SIGUSR1 asks a run to stop soon: it ends its step, writes a checkpoint and stops, to be gone on with later.

SLURM sends it before the time limit (scripts/slurm/train.sbatch); by hand it is `kill -USR1 <process id>`.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Call it to know whether the run was asked to stop; `listen` makes the signal ask."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def listen(self) -> StopRequest:
        """Heed the signal from now on (main thread only)."""
        signal.signal(signal.SIGUSR1, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
