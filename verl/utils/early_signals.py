"""Signals that come while a program loads: one line and a status, before anything is started.

`StopRequest.listen` takes over when the run begins.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_INTERRUPTED = (130, "interrupted: no step was begun")
_ENDS = {
    signal.SIGINT: _INTERRUPTED,
    signal.SIGUSR2: _INTERRUPTED,  # a Ctrl-C that scripts/run_training.sh passes on
    signal.SIGUSR1: (3, "stopped: asked to stop before the first step; the same command begins again"),
}


def end_on_signals(argv: Sequence[str]) -> None:
    """End the program at once on a Ctrl-C, or a request to stop, from now on.

    Nothing has to be cleaned up so early. An exception would not do: libraries turn a KeyboardInterrupt in
    their midst into other errors. An ignored SIGINT stays ignored. A sweep (`--multirun` among the arguments
    `argv`) has jobs, to which it passes signals on itself.
    """
    if "--multirun" in argv or "-m" in argv:
        return
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """Say how the program ends, and end it."""
    status, line = _ENDS[signal.Signals(number)]
    sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
    os._exit(status)
