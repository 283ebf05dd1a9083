"""A run that goes on by itself after failures and collapses.

It goes on when a worker, its node or its engine is gone (`trainer.max_restarts`), and when its policy has
collapsed (`trainer.on_collapse: rewind`):

    start: build, load the models                  a user's mistake ends the run here, with its line
    fit:   train ---> done
             | WorkerDiedError, EngineUnavailable        | CollapseSeen
             v                                           v
           end all workers                             keep the branch, set later checkpoints aside
             |                                           |
             +--> build anew when the cluster has room again -> train from the newest checkpoint, as after a
                  restart by hand: records cut back, same next step; after a rewind with its remedy

With `python -m verl.rl` the driver is an actor, the orchestrator, which may be lost too: the command starts
another one (orchestrator.py), whose run begins as a restart. `trainer.max_restarts` counts both kinds.

Each restart and each rewind is a line in `<run folder>/restarts.jsonl`; `trainer/num_restarts` and
`trainer/num_rewinds` count them in the metrics.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from verl.checkpoints.file_names import RESTARTS_FILE
from verl.checkpoints.remote_store import RemoteFailed
from verl.checkpoints.run_state import DISK_ERRORS, RunState, RunStopped, step_of
from verl.config import Config, replace_values
from verl.records.recorder import BRANCHES
from verl.sessions.engine_contract import EngineUnavailable
from verl.single_controller.base import WorkerDiedError
from verl.trainer.command import Command
from verl.trainer.ppo.stop_request import StoppedOnRequest, StopRequest
from verl.trainer.rewinds import (
    CollapseSeen,
    Rewind,
    note_rewind,
    rewinds_before,
    step_before,
    with_remedies,
)
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.sft_trainer import FSDPSFTTrainer

RECOVERABLE = (WorkerDiedError, EngineUnavailable)
# A run that fails so often without a new checkpoint in between fails for ever.
MOST_FAILURES_FROM_ONE_STEP = 3
_SECONDS_TO_END = 10.0  # after SIGTERM; SLURM kills a job 30 seconds after it, unless KillWait says otherwise


def run_program(
    start: Callable[[ExitStack, StopRequest], RestartingRun | FSDPSFTTrainer | int],
    stop_request: StopRequest | None = None,
) -> int:
    """Run a program whose settings have passed the first checks.

    Args:
        start: starts everything that training needs, and puts the callbacks that end it on the stack. It
            returns the object that trains, or an exit status. It raises ValueError for a user's mistake.
        stop_request: hears the signals that ask the run to stop; None for a new one, if this process is the
            driver that was started as a command.

    Returns:
        The exit status. A user's mistake (2) and a run that ends before its time (3) print one line on
        stderr.
    """
    signal.signal(signal.SIGTERM, partial(_end_everything, is_driver=stop_request is None))
    stop_request = (stop_request or StopRequest()).listen()
    with ExitStack() as closing:
        try:
            try:
                training = start(closing, stop_request)
            except ValueError as error:
                print(f"error: {printable(error)}", file=sys.stderr)
                return 2
            if isinstance(training, int):
                return training
            training.fit()
        except (RunStopped, *RECOVERABLE) as error:
            kind = "stopped" if isinstance(error, StoppedOnRequest) else "error"
            print(f"{kind}: {printable(error)}", file=sys.stderr)
            return 3
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            print(f"error: {error.filename or 'a file'} can't be written: {error.strerror}", file=sys.stderr)
            return 3
        except KeyboardInterrupt:
            print(f"interrupted: {stop_request.what_is_kept()}", file=sys.stderr)
            return 130
    return 0


def _end_everything(number: int, frame: FrameType | None, is_driver: bool) -> None:
    """End the program on SIGTERM: what it has started first, but a driver within seconds.

    A scheduler sends the signal to all processes of a job. Ray's may be gone before this one asks them to end
    its workers, and would be waited for. A second signal does not break off what the first one has begun.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if is_driver:
        timer = threading.Timer(_SECONDS_TO_END, _end_at_once, [128 + number])
        timer.daemon = True
        timer.start()
    sys.exit(128 + number)


def _end_at_once(status: int) -> None:
    """End the program although something of it does not end. Ray ends the workers of a lost driver."""
    sys.stdout.flush()
    os.write(2, f"ended at once: the run was not over {_SECONDS_TO_END:g} s after SIGTERM\n".encode())
    os._exit(status)


class RestartingRun:
    """A trainer, and the trainers that take its place after restarts and rewinds.

    Args:
        config: the configuration, whose `trainer.backend` is decided.
        build: makes a trainer, with no process started, from a configuration.
        command: the command of `verl.rl` whose orchestrator this process is, if it is one.
    """

    def __init__(
        self, config: Config, build: Callable[[Config], RayPPOTrainer], command: Command | None = None
    ) -> None:
        self.config = config
        self._build = build
        self.max_restarts = config.trainer.max_restarts if config.trainer.backend != "local" else 0
        self.num_restarts = 0
        self.has_rewound = False  # whether the run has gone back in this process
        self.trainer: RayPPOTrainer | None = None
        self._resume_step = 0  # step of the checkpoint that a restart goes on from
        # Whether that checkpoint is of this run, not the one that it was started from.
        self._resumes_own_checkpoint = False
        self._failures_in_a_row = 0  # failures since the run has gone on from that checkpoint
        self._command = command
        # Whether the orchestrator before this one was lost before the run had a checkpoint: it begins anew.
        self._begins_again = False

    def start(self) -> None:
        """Build the trainer and load the models.

        Raises:
            ValueError: for a user's mistake, such as more processes than the cluster has room for.
            RunStopped: if a process died and may not be started again.
        """
        if self._command is not None and self._command.death and self.num_restarts == 0:
            self._take_over(self._command)
        config = self.config
        goes_on = self.num_restarts > 0 or self.has_rewound
        keeps_mode = self._begins_again or config.trainer.resume_mode == "from_path"
        if goes_on and (self._resumes_own_checkpoint or not keeps_mode):
            config = replace_values(config, {"trainer.resume_mode": "auto", "trainer.resume_from_path": None})
        try:
            self.trainer = self._build(config)
            self.trainer.num_restarts = self.num_restarts
            self.trainer.when_folder_is_taken = partial(self._apply_rewinds, self.trainer)
            if goes_on:
                for pool in self.trainer.resource_pool_manager.resource_pool_dict.values():
                    pool.timeout_seconds = config.trainer.restart_timeout
            self.trainer.init_workers()
        except WorkerDiedError as error:
            self._handle_failure(error)
        except ValueError as error:
            if not goes_on:
                raise
            # The same was right at the start: the cluster or a disk is another one now.
            raise RunStopped(f"the run could not be started again: {error} {self._resume_hint()}") from error

    def fit(self) -> None:
        """Train to the end, over as many restarts as that takes and `trainer.max_restarts` allows.

        Raises RunStopped if the run can't go on.
        """
        while True:
            try:
                while self.trainer is None:
                    self.start()
                self.trainer.fit()
                return
            except CollapseSeen as collapse:
                if self.config.trainer.on_collapse != "rewind":
                    raise
                self._rewind(collapse)
            except RECOVERABLE as error:
                self._handle_failure(error)

    def shutdown(self) -> None:
        """End the workers; a second call does nothing."""
        trainer = self.trainer
        self.trainer = None
        if trainer is not None:
            trainer.shutdown()

    def _take_over(self, command: Command) -> None:
        """Begin as a restart of the run that a lost orchestrator of the same command has led.

        Raises RunStopped if the command's restarts are used up, or if the run makes no progress.
        """
        run_dir = Path(self.config.trainer.default_local_dir)
        newest = command.newest_step(run_dir)
        self._resumes_own_checkpoint = newest is not None
        self._begins_again = newest is None
        if newest is not None:
            self._resume_step = newest
        restarts = command.restarts(run_dir)
        self.num_restarts = len(restarts)
        later = takewhile(lambda step: step == self._resume_step, reversed(restarts))
        self._failures_in_a_row = 1 + len(list(later))
        self._check_progress()
        self._count_restart(run_dir, command.death)

    def _apply_rewinds(self, trainer: RayPPOTrainer) -> None:
        """Give a trainer, whose workers are not made yet, what the rewinds of the run have changed."""
        config = trainer.config
        if config.trainer.resume_mode == "none":  # what is in the folder is another run's
            rewinds: list[Rewind] = []
        else:
            rewinds = rewinds_before(trainer.checkpoints.run_dir, step_of(trainer.resume_folder))
        trainer.config = with_remedies(config, rewinds)
        trainer.num_rewinds = len(rewinds)
        if config.trainer.on_collapse == "rewind":
            trainer.rewinds_left = max(0, config.trainer.max_rewinds - len(rewinds))

    def _rewind(self, collapse: CollapseSeen) -> None:
        """Put the run back to its newest checkpoint from before the collapse, and end the trainer.

        Raises RunStopped if there is none, and the run did not begin at step 0.
        """
        trainer = self.trainer
        assert trainer is not None
        checkpoints = trainer.checkpoints
        onset = collapse.finding.onset
        try:
            from_step = step_before(checkpoints, onset, 0)
            if from_step == 0:
                from_step = self._start_before(collapse)
            rewind = Rewind(trainer.num_rewinds + 1, collapse.step, from_step, onset, collapse.finding.line)
            remedy = rewind.remedy(self.config)
            trainer.recorder.keep_branch(rewind.number, from_step)
            checkpoints.end_uploads()  # an upload under way would come after what is set aside
            checkpoints.set_aside_after(from_step)
        except RemoteFailed as error:
            raise RunStopped(f"the run can't go back from a collapse: {error}") from error
        note_rewind(checkpoints.run_dir, rewind, remedy)
        self._resumes_own_checkpoint = from_step in checkpoints.steps_anywhere()
        self.shutdown()
        self.has_rewound = True
        self._resume_step = from_step
        origin = f"the checkpoint of step {from_step}" if from_step else "its start"
        values = ", ".join(f"{key}={value:.3g}" for key, value in remedy.items() if value > 0)
        print(
            f"rewind {rewind.number} of {self.config.trainer.max_rewinds} (trainer.max_rewinds): {collapse} "
            f"The run goes on from {origin} with {values}. The steps that it leaves are in "
            f"{checkpoints.run_dir / BRANCHES / str(rewind.number)}",
            flush=True,
        )

    def _start_before(self, collapse: CollapseSeen) -> int:
        """Return the step that the run began with, where no checkpoint of its own is from before a collapse.

        Raises RunStopped if the run began with another run's checkpoint that is not from before the collapse
        either, or if its beginning is not known.
        """
        trainer = self.trainer
        assert trainer is not None
        settings = self.config.trainer
        onset = collapse.finding.onset
        if settings.resume_mode == "from_path":
            origin = step_of(Path(str(settings.resume_from_path)))
            if origin < onset:
                return origin
            reason = f"the checkpoint that it began with, of step {origin}, is not from before step {onset}"
        elif trainer.recorder.first_step() <= 1:
            return 0
        else:
            reason = f"no checkpoint from before step {onset} is left, and the run did not begin at step 0"
        raise RunStopped(
            f"{collapse} The run can't go back: {reason}. Begin with an earlier checkpoint "
            "(trainer.resume_mode=from_path), or set trainer.on_collapse=warn."
        )

    def _handle_failure(self, error: Exception) -> None:
        """End what is left of the workers; return if the run may be built anew.

        Raises RunStopped if it may not.
        """
        trainer = self.trainer
        assert trainer is not None
        print(f"error: {printable(error)}", file=sys.stderr, flush=True)
        self.shutdown()
        self._failures_in_a_row += 1
        if trainer.checkpoints.last_written is not None:
            self._resume_step = trainer.checkpoints.last_written
            self._resumes_own_checkpoint = True
            self._failures_in_a_row = 1
        elif self.num_restarts == 0 and trainer.resume_folder is not None:
            self._resume_step = RunState.load(trainer.resume_folder).step
        if self.max_restarts == 0:
            hint = self._resume_hint()
            raise RunStopped(
                f"{hint} With trainer.max_restarts=3 (and trainer.backend=ray) it does so by itself."
            )
        self._check_restarts_left()
        self._check_progress()
        self._count_restart(trainer.checkpoints.run_dir, str(error))

    def _check_progress(self) -> None:
        """Raise RunStopped if the run has failed too often without another checkpoint in between."""
        if self._failures_in_a_row >= MOST_FAILURES_FROM_ONE_STEP:
            raise RunStopped(
                f"the run failed {MOST_FAILURES_FROM_ONE_STEP} times in a row without getting from step "
                f"{self._resume_step} to another checkpoint: it would fail again. The causes are above; a "
                "smaller trainer.save_freq helps if they only come often."
            )

    def _check_restarts_left(self) -> None:
        """Raise RunStopped if no restart is left."""
        if self.num_restarts >= self.max_restarts:
            used_up = f"trainer.max_restarts={self.max_restarts} restarts are used up."
            raise RunStopped(f"{used_up} {self._resume_hint()}")

    def _count_restart(self, run_dir: Path, reason: str) -> None:
        """Count a restart, say it and write it down.

        Raises RunStopped if no restart is left.
        """
        self._check_restarts_left()
        self.num_restarts += 1
        print(
            f"restart {self.num_restarts} of {self.max_restarts} (trainer.max_restarts): the run goes on "
            f"from step {self._resume_step}",
            flush=True,
        )
        record = {
            "restart": self.num_restarts,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "from_step": self._resume_step,
            "reason": reason,
        }
        if self._command is not None:
            record["command"] = self._command.number
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / RESTARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _resume_hint(self) -> str:
        command = "the same command again"
        mode = self.config.trainer.resume_mode
        if mode == "none" or (mode == "from_path" and self._resumes_own_checkpoint):
            # Without this the command would leave the steps of this run behind.
            command += " with trainer.resume_mode=auto"
            command += " trainer.resume_from_path=null" if mode == "from_path" else ""
        return f"Run {command}: the run goes on from step {self._resume_step}."
