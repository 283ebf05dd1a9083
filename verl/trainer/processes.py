"""A run with trainer.backend=folder on one machine: its driver and processes are started, watched and named.

Whoever is killed is started again, trainer.max_restarts times in all, and the run goes on from its last
checkpoint. All end with the process that started them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from verl.config import Config

DRIVER = "orchestrator"
TRAINER = "train_worker"
SAMPLER = "inference"
SILENT_SECONDS = 60.0  # without a beat: as long as the driver waits for one, see single_controller/folder.py
SECONDS_TO_END = 20.0
SECONDS_TO_NOTICE = 20.0  # for the driver, that a process is gone for good
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def process_folder(config: Config) -> Path:
    """Through which the driver calls the processes of a run: beside its own folder, which may be renamed."""
    return Path(f"{Path(config.trainer.default_local_dir).absolute()}.processes")


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class RunProcesses:
    """Those of a run, whose settings `argv` are checked. ValueError: it is not one of this machine alone."""

    def __init__(self, argv: Sequence[str], config: Config) -> None:
        trainer = config.trainer
        rollout = config.actor_rollout_ref.rollout
        if trainer.nnodes > 1:
            raise ValueError(
                f"Found trainer.nnodes={trainer.nnodes} with trainer.backend=folder; expected 1, or "
                "that you start the processes: verl.orchestrator, verl.train_worker, verl.inference"
            )
        self.argv = list(argv)
        self.max_restarts = trainer.max_restarts
        self.num_trainers = trainer.n_gpus_per_node
        self.folder = process_folder(config)
        samplers = rollout.num_processes if rollout.placement == "apart" else 0
        self.places = [DRIVER, *(f"{TRAINER}-{rank}" for rank in range(self.num_trainers))]
        self.places += [f"{SAMPLER}-{rank}" for rank in range(samplers)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # by name: `train_worker-0`
        self.asked = 0  # signal that was sent to this process
        self.tracker = Path(trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
        self.began = time.time()
        self._beat(DRIVER).unlink(missing_ok=True)  # of an earlier run; one that goes on writes it again

    def _beat(self, place: str) -> Path:
        return self.folder / f"{'driver' if place == DRIVER else place}.json"

    def _is_over(self) -> bool:
        """Whether the driver has said so: it and the others only have to end."""
        with suppress(OSError, ValueError):
            return bool(json.loads(self._beat(DRIVER).read_text(encoding="utf-8"))["over"])
        return False

    def _kill_silent(self) -> None:
        """Kill each process that has begun to beat and does so no more, so that it is started again."""
        for place, process in self.running.items():
            with suppress(OSError, psutil.Error):
                began = psutil.Process(process.pid).create_time()
                if began < self._beat(place).stat().st_mtime < time.time() - SILENT_SECONDS:
                    print(f"{place} (pid {process.pid}) is silent", file=sys.stderr, flush=True)
                    process.kill()

    def start(self, place: str) -> None:
        program, _, rank = place.partition("-")
        command = [sys.executable, "-m", f"verl.{program}", *self.argv]
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}  # they share cores
        if rank:  # each has a GPU of its own, where there are any
            command += ["--rank", rank, "--parent", str(os.getpid())]
            gpu = int(rank) + (program == SAMPLER) * self.num_trainers
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = [str(i) for i in range(gpu + 1)] if visible is None else visible.split(",")
            environment["CUDA_VISIBLE_DEVICES"] = gpus[gpu] if gpu < len(gpus) else ""
        elif self.tracker.exists() and self.tracker.stat().st_mtime > self.began:  # a checkpoint of this run
            command += ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
        self.running[place] = subprocess.Popen(
            command, env=environment, preexec_fn=die_with_parent, start_new_session=True
        )

    def run(self) -> int:
        """To the end of the run: returns the driver's exit status, 3 if a process is gone for good."""
        for each in PASSED_ON:  # nohup ignores some, and so does a shell that passes on itself
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, self.pass_on)
        num_restarts = 0
        gone_since = float("inf")
        try:
            for place in self.places:
                self.start(place)
            while time.monotonic() - gone_since < SECONDS_TO_NOTICE:  # it waits for those that never come
                time.sleep(0.1)
                self._kill_silent()
                for place, process in list(self.running.items()):
                    if (status := process.poll()) is None:
                        continue
                    del self.running[place]
                    is_over = self._is_over()
                    if place == DRIVER and (status >= 0 or self.asked or is_over):
                        return status if status >= 0 else 128 - status
                    if is_over:
                        continue
                    killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else ""
                    told = f"{place} (pid {process.pid}) {killed or f'ended with {status}'}: it is"
                    goes_on = num_restarts < self.max_restarts and status != 2  # 2: a user's mistake
                    what = "" if goes_on else f"not (trainer.max_restarts={self.max_restarts}) "
                    print(f"{told} {what}started again", file=sys.stderr, flush=True)
                    if goes_on:
                        num_restarts += 1
                        self.start(place)
                    elif place == DRIVER:
                        return 3
                    else:  # the driver says where the run stands, and ends
                        gone_since = min(gone_since, time.monotonic())
            return 3
        finally:
            self.end()

    def pass_on(self, number: int, frame: object) -> None:
        """Pass a signal on to the driver, which ends the run."""
        self.asked = number
        if DRIVER in self.running:
            self.running[DRIVER].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def end(self) -> None:
        """Those that are left end by themselves if the driver has told them to; else they are killed."""
        until = time.monotonic() + SECONDS_TO_END * self._is_over()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            process.kill()
            process.wait()
