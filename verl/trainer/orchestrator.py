"""A run whose driver is a Ray actor too: `python -m verl.rl @ run.yaml` starts it and watches it.

    this command --- starts ---> <experiment>/orchestrator --- starts ---> <experiment>/trainer-0, ..
         signals ------------->  main_ppo.run: the driver                  <experiment>/sampler-0, ..
         its lines, status <---                                            placed by resources

If a trainer or a sampler dies, the orchestrator starts all of them anew (restarts.py). If the orchestrator
itself dies, Ray ends its trainers and samplers, and this command starts the next one, which goes on from the
last checkpoint. Nothing here imports torch, so that the command is small and quick.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config import Config
from verl.single_controller.names import ORCHESTRATOR, RunNames
from verl.single_controller.ray.deaths import ProcessPlace, describe_death
from verl.single_controller.ray.environment import (
    PROCESS_NAME,
    carried_variables,
    command_variables,
    import_path,
)
from verl.single_controller.ray.session import (
    cores_for_ray,
    init_ray,
    names_in,
    receive_lines,
    wait_until_free,
)
from verl.trainer.command import Command
from verl.utils.text import printable

# SIGUSR2 is a Ctrl-C that scripts/run_training.sh passes on.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError)
SECONDS_TO_END = 60.0  # for a run that was told to end at once
SECONDS_TO_GO = 60.0  # for trainers and samplers whose orchestrator is gone
SECONDS_FOR_LAST_LINES = 5.0  # for what the orchestrator wrote last
SECONDS_FOR_ROOM = 60.0  # for a node with room for the orchestrator
SECONDS_BETWEEN_LOOKS = 0.2


class Orchestrator:
    """The actor: the driver of a run, in its main thread.

    `locate` answers as soon as there is a process; `prepare` imports the libraries and begins to listen to
    signals; `run` is the whole run.
    """

    def __repr__(self) -> str:
        """Return the name before the lines that it writes."""
        return ORCHESTRATOR

    def locate(self) -> ProcessPlace:
        """Return where this process lives."""
        return ProcessPlace.here()

    def prepare(self, folder: str, variables: dict[str, str]) -> None:
        """Get ready to stand in for the command.

        Args:
            folder: the command's working directory.
            variables: the command's environment variables.

        Raises:
            ValueError: if this node does not have the folder.
        """
        # Ray sets one thread where the user says nothing; it must not look like the user's setting.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(variables)
        try:
            os.chdir(folder)
        except OSError as error:
            node = ray.util.get_node_ip_address()
            raise ValueError(
                f"Found no folder {folder} on node {node} ({error.strerror}); expected the folder in which "
                "the command is typed on all nodes. Put it on a disk that all of them see."
            ) from error
        receive_lines()
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes through the command alone
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it
        from verl.trainer.ppo.stop_request import StopRequest

        self.stop_request = StopRequest().listen()

    def run(self, argv: list[str], command: Command, last_line: str) -> int:
        """Run to the end, and return the exit status.

        Args:
            argv: the arguments of the run.
            command: the command that started this orchestrator.
            last_line: a line to end both outputs with, so that the command has seen all others.
        """
        from verl.trainer.main_ppo import run

        try:
            return run(argv, command=command, stop_request=self.stop_request)
        except SystemExit as error:  # by SIGTERM: for Ray it would be a death
            return error.code if isinstance(error.code, int) else 1
        finally:
            for file in (sys.stdout, sys.stderr):
                print(last_line, file=file, flush=True)


class OutputOfRun:
    """A display of all processes' lines: the orchestrator's as they are, others with name and process.

    `ended` is set when the orchestrator has written `last_line` to both of its outputs.
    """

    def __init__(self) -> None:
        self.last_line = f"the output of the orchestrator ends here ({uuid.uuid4().hex})"
        self.ended = threading.Event()
        self._num_ended = 0

    def show(self, data: dict[str, Any]) -> None:
        """Show a message of Ray's, with lines of one process."""
        from ray._private.worker import print_to_stdstream  # nothing public replaces the prefix

        if data.get("actor_name") != ORCHESTRATOR:
            print_to_stdstream(data, ignore_prefix=False)
            return
        file = sys.stderr if data["is_err"] else sys.stdout
        for line in data["lines"]:
            if line == self.last_line:
                self._num_ended += 1
                if self._num_ended == 2:
                    self.ended.set()
            else:
                print(line, file=file, flush=True)

    def take_over(self) -> None:
        """Show lines here in place of Ray's own way."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
        global_worker_stdstream_dispatcher.add_handler("lines of the run", self.show)


class EndedBySignal(Exception):
    """An error that says by which signal this command ends."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class OrchestratedRun:
    """The orchestrators of a command, one after the other, from its start to its end.

    starting: an actor waits for room and imports      SIGUSR1 is kept; other signals end the command
    running:  it listens, `run` is under way           signals are passed on
    lost:     it died, its workers end with it         -> starting, `trainer.max_restarts` times in all

    Args:
        argv: the arguments of the run, which have passed the first checks.
        config: the configuration that they give.
    """

    def __init__(self, argv: Sequence[str], config: Config) -> None:
        self.argv = list(argv)
        self.trainer = config.trainer
        self.names = RunNames.of(config.trainer.experiment_name, config.trainer.default_local_dir)
        self.command = Command(uuid.uuid4().hex[:12], time.time())
        self.output = OutputOfRun()
        self.num_restarts = 0
        self.place: ProcessPlace | None = None  # of the present orchestrator; None until it has said it
        self.listens = False  # whether the present orchestrator listens to signals
        self.asked: list[int] = []  # signals that came and are not passed on yet
        self.was_interrupted = False
        self.ends_by = 0  # the signal that ends the run at once; 0 while none has come
        self.ends_at = float("inf")  # when the run is ended by force

    def run(self) -> int:
        """Run to the end; return the exit status."""
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores some
                signal.signal(number, self._note)
        # A cluster of its own offers one CPU more, for the orchestrator, so that as many others fit.
        try:
            num_cpus = None if os.environ.get("RAY_ADDRESS") else cores_for_ray() + 1
            session = init_ray(num_cpus=num_cpus)
        except ValueError as error:
            print(f"error: {printable(error)}", file=sys.stderr)
            return 2
        with session:
            self.output.take_over()
            while True:
                status = self._lead()
                if status is not None:
                    return status
                self._wait_for_workers_to_go()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(signal.SIGINT if number == signal.SIGUSR2 else number)

    def _lead(self) -> int | None:
        """Start an orchestrator and watch it until it ends.

        Returns:
            The exit status of the run, or None if the orchestrator died and another one may be started.
        """
        self.place = None
        self.listens = False
        actor = None
        method = "its start"
        try:
            wait_until_free(self.names.namespace, [self.names.full(ORCHESTRATOR)])
            actor = self._create()
            self.place = self._result(actor.locate.remote(), self._seconds_for_room())
            self._result(actor.prepare.remote(os.getcwd(), command_variables()))
            self.listens = True
            method = "the run"
            status: int = self._result(actor.run.remote(self.argv, self.command, self.output.last_line))
            self.output.ended.wait(SECONDS_FOR_LAST_LINES)
            return status
        except EndedBySignal as ended:
            if ended.number == signal.SIGINT:
                print("interrupted: no step was begun", file=sys.stderr)
            return 128 + ended.number
        except TaskCancelledError:  # Ctrl-C between two of its methods
            return 128 + signal.SIGINT
        except DEATHS as error:
            if self.ends_by:
                return 128 + self.ends_by
            # Its last lines have been shown as they are.
            death = describe_death(ORCHESTRATOR, self.place, method, error, shows_lines=False)
            return self._status_after(death)
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError) and not self.listens:
                return self._mistake(error.cause)
            print(printable(error), file=sys.stderr)  # with the traceback of the orchestrator
            return 1
        except ValueError as error:
            return self._mistake(error)
        finally:
            if actor is not None:
                ray.kill(actor, no_restart=True)

    def _mistake(self, error: Exception) -> int:
        """Say why an orchestrator can't be started; return the exit status."""
        print(f"error: {printable(error)}", file=sys.stderr)
        return 3 if self.num_restarts else 2  # what was right at the start is no mistake of the user's

    def _status_after(self, death: str) -> int | None:
        """Return the exit status after a death of an orchestrator, or None if another one may be started."""
        print(f"error: {printable(death)}", file=sys.stderr, flush=True)
        if self.num_restarts >= self.trainer.max_restarts:
            hint = f"trainer.max_restarts={self.trainer.max_restarts} restarts are used up."
            if self.trainer.max_restarts == 0:
                hint = "With trainer.max_restarts=3 another one is started."
            print(
                f"error: {hint} The same command with trainer.resume_mode=auto goes on from the last "
                "checkpoint.",
                file=sys.stderr,
            )
            return 3
        self.num_restarts += 1
        self.command = replace(self.command, death=death)
        print("another orchestrator is started", flush=True)
        return None

    def _create(self) -> Any:
        name = self.names.full(ORCHESTRATOR)
        variables = carried_variables() | {"PYTHONPATH": import_path(), PROCESS_NAME: name}
        # It holds no GPU, and sees those of its node all the same: the plan of memory looks at them.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        actor_cls = ray.remote(Orchestrator).options(
            name=name,
            namespace=self.names.namespace,
            num_cpus=self.trainer.cpus_per_process,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": variables},
        )
        return actor_cls.remote()

    def _seconds_for_room(self) -> float:
        """Return how many seconds an orchestrator waits for a node with room."""
        return self.trainer.restart_timeout if self.num_restarts else SECONDS_FOR_ROOM

    def _result(self, reference: Any, seconds: float = float("inf")) -> Any:
        """Return what a method of the orchestrator returns, and pass on signals meanwhile.

        Raises:
            EndedBySignal: if a signal ends the command.
            ValueError: if the method is not over within `seconds`.
        """
        due = time.monotonic() + seconds
        while True:
            with suppress(GetTimeoutError):
                return ray.get(reference, timeout=SECONDS_BETWEEN_LOOKS)
            self._pass_on_signals()
            now = time.monotonic()
            if now > self.ends_at:
                raise EndedBySignal(self.ends_by)
            if now > due:
                raise ValueError(
                    f"Found no node with room for {self.names.full(ORCHESTRATOR)} after {seconds:g} s; "
                    f"expected one with {self.trainer.cpus_per_process:g} of Ray's CPUs free. End what holds "
                    "them, or let other nodes join (scripts/ray_node.sh)."
                )

    def _pass_on_signals(self) -> None:
        """Pass on the signals that came, as the driver would treat them.

        Raises EndedBySignal for one that ends a run before it has begun.
        """
        asked = self.asked
        self.asked = []
        for number in asked:
            if not self.listens and number == signal.SIGUSR1:
                self.asked.append(number)
                continue
            if not self.listens or self.place is None:
                raise EndedBySignal(number)
            is_second_interrupt = number == signal.SIGINT and self.was_interrupted
            if number in (signal.SIGTERM, signal.SIGHUP) or is_second_interrupt:
                self.ends_by = self.ends_by or number
                self.ends_at = min(self.ends_at, time.monotonic() + SECONDS_TO_END)
            self.was_interrupted = self.was_interrupted or number == signal.SIGINT
            _send_signal(self.place, signal.SIGTERM if number == signal.SIGHUP else number)

    def _wait_for_workers_to_go(self) -> None:
        """Wait until Ray has ended the workers of an orchestrator that died; end those that stay."""
        due = time.monotonic() + SECONDS_TO_GO
        while names := names_in(self.names.namespace):
            if time.monotonic() > due:
                for name in names:
                    with suppress(ValueError):  # it has just gone
                        ray.kill(ray.get_actor(name, self.names.namespace), no_restart=True)
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _send_signal(place: ProcessPlace, number: int) -> None:
    """Send a signal to a process of the run, on whatever node it lives."""
    if place.node == ray.get_runtime_context().get_node_id():
        _kill(place.pid, number)
        return
    pinned = NodeAffinitySchedulingStrategy(place.node, soft=False)
    task = ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
    task.remote(place.pid, number)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the run has just ended
        os.kill(pid, number)
