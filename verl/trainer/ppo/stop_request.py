"""The request that a run ends after its step."""

from __future__ import annotations

import signal
from types import FrameType

from verl.checkpoints.run_state import RunStopped


class StopRequest:
    """A user's or a scheduler's request, by a signal, that a run ends after its step.

    SIGUSR1 or a first Ctrl-C asks the run to end after its step, with a checkpoint. A second Ctrl-C ends it
    at once. SLURM sends SIGUSR1 before the time limit (scripts/slurm/train.sbatch). You send it with
    `kill -USR1 <process id>`. A Ctrl-C before the first step ends the run at once: there is nothing to keep.

    SIGUSR2 is a Ctrl-C that scripts/run_training.sh passes on. The shell makes the processes that it starts
    in the background ignore SIGINT.
    """

    def __init__(self) -> None:
        self.asked = False
        self.step: int | None = None  # the step that is being made; None before the first

    def listen(self) -> StopRequest:
        """Heed the signals from now on; call this in the main thread only.

        An ignored SIGINT stays ignored: a script that runs this in the background passes a Ctrl-C on as
        SIGUSR2.
        """
        signal.signal(signal.SIGUSR1, self._ask)
        signal.signal(signal.SIGUSR2, self._interrupt)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def what_is_kept(self) -> str:
        """Say what is kept, for the message of a run that was ended at once."""
        if self.step is None:
            return "no step was begun"
        return f"step {self.step} is lost; the same command goes on from the last checkpoint"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked or self.step is None:
            raise KeyboardInterrupt
        self._ask(number, frame)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            when = "its first step" if self.step is None else f"step {self.step}"
            print(
                f"\nstopping: the run ends after {when}, with a checkpoint, and the same command goes on "
                "from it. A second Ctrl-C ends it at once.",
                flush=True,
            )
        self.asked = True


class StoppedOnRequest(RunStopped):
    """An error of a run that was asked to stop, and has written a checkpoint to go on from."""

    def __init__(self, step: int) -> None:
        consequence = f"the checkpoint of step {step} is written, and the same command goes on from it"
        super().__init__(f"asked to stop; {consequence}.")
