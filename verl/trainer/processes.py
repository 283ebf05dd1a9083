"""A run with trainer.backend=folder on one machine: its processes are started, watched and named.

    verl.orchestrator    the driver
    verl.train_worker    trainer.n_gpus_per_node of them
    verl.inference       rollout.num_processes of them, with rollout.placement=apart

Whoever is killed is started again, trainer.max_restarts times in all, and the run goes on from its last
checkpoint. All end with the process that started them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from verl.config import Config

DRIVER, TRAINER, SAMPLER = "orchestrator", "train_worker", "inference"
SECONDS_TO_END = 20.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class RunProcesses:
    """Those of a run, by name: `train_worker-0`. ValueError: the run is not one of this machine alone."""

    def __init__(self, argv: Sequence[str], config: Config) -> None:
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        if trainer.nnodes > 1:
            raise ValueError(
                f"Found trainer.nnodes={trainer.nnodes} with trainer.backend=folder; expected 1, or "
                "that you start the processes: verl.orchestrator, verl.train_worker, verl.inference"
            )
        self.argv, self.max_restarts, self.num_trainers = (
            list(argv),
            trainer.max_restarts,
            trainer.n_gpus_per_node,
        )
        samplers = rollout.num_processes if rollout.placement == "apart" else 0
        self.places = [DRIVER, *(f"{TRAINER}-{rank}" for rank in range(self.num_trainers))]
        self.places += [f"{SAMPLER}-{rank}" for rank in range(samplers)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, place: str, *more: str) -> None:
        program, _, rank = place.partition("-")
        command = [sys.executable, "-m", f"verl.{program}", *self.argv, *more]
        environment = dict(os.environ)
        if rank:  # each has a GPU of its own, where there are any
            command += ["--rank", rank]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = visible.split(",") if visible is not None else [str(i) for i in range(len(self.places))]
            gpu = int(rank) + (program == SAMPLER) * self.num_trainers
            environment["CUDA_VISIBLE_DEVICES"] = gpus[gpu] if gpu < len(gpus) else ""
        else:
            environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        self.running[place] = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)

    def run(self) -> int:
        """To the end of the run: returns the driver's exit status, 3 if it was killed and can't go on."""
        for place in self.places:
            self.start(place)
        num_restarts = 0
        while True:
            time.sleep(0.1)
            for place, process in list(self.running.items()):
                status = process.poll()
                if status is None:
                    continue
                del self.running[place]
                if place == DRIVER and status >= 0:
                    return status
                if status == 0:  # the driver has said that the run is over
                    continue
                how = (
                    f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
                )
                goes_on = num_restarts < self.max_restarts
                what = "it is started again" if goes_on else f"trainer.max_restarts={self.max_restarts}"
                print(f"{place} (pid {process.pid}) {how}: {what}", file=sys.stderr, flush=True)
                if goes_on:
                    num_restarts += 1
                    self.start(place, *["trainer.resume_mode=auto"] * (place == DRIVER))
                elif place == DRIVER:
                    return 3

    def pass_on(self, number: int, frame: object) -> None:
        """A signal goes to the driver, which ends the run."""
        if DRIVER in self.running:
            self.running[DRIVER].send_signal(number)

    def end(self) -> None:
        """Those that are left end by themselves, as the driver has told them; or are killed."""
        until = time.monotonic() + SECONDS_TO_END
        for process in self.running.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_processes(argv: Sequence[str], config: Config) -> int:
    """A run with trainer.backend=folder, whose settings `argv` are checked. Returns its exit status."""
    processes = RunProcesses(argv, config)
    for each in PASSED_ON:
        signal.signal(each, processes.pass_on)
    try:
        return processes.run()
    finally:
        processes.end()
