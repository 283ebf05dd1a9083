"""What stands behind the stand-ins of SLURM's commands: a job on namespaces as nodes.

    sbatch -> Job.run -> batch script on node1 -> srun --(socket)--> Job -> step on a node
                                               -> scontrol requeue, scancel --(socket)--> Job

A step's output goes to srun's own stdout and stderr, which come over the socket as descriptors. A step whose
srun is gone is killed, as are all steps when the batch script ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from namespace_nodes import NamespaceNode, NamespaceNodes

KILL_WAIT = 10  # seconds from SIGTERM to SIGKILL; SLURM's default is 30
STATUS_OF_A_JOB_THAT_WAS_KILLED = 137


class Step:
    """A command on a node in a process group of its own, with the given descriptors as its output."""

    def __init__(
        self, node: NamespaceNode, command: list[str], cwd: str, env: dict[str, str], out: int, err: int
    ):
        self._process = subprocess.Popen(
            node.enter(["setsid", *command], cwd), env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        self._group: int | None = None

    def signal(self, number: int, group: bool = True) -> None:
        """To all processes of the step's group, or to its first alone."""
        while self._group is None and self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children():
                    self._group = child.pid
            time.sleep(0.005)
        if self._group is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._group, number)

    def wait(self, timeout: float | None = None) -> int:
        """The status as a shell would say it. TimeoutExpired as Popen.wait."""
        status = self._process.wait(timeout)
        return status if status >= 0 else 128 - status


@dataclass
class Job:
    """A job: how it was submitted, and (`run`) its life.

    Attributes:
        folder: short path for the socket, the copied script and the nodes' files.
        shared: folder that all nodes see, beside the repository and what is not below /tmp.
        limit, signal_before: seconds.
    """

    folder: Path
    shared: Path
    name: str
    num_nodes: int
    script: str
    arguments: list[str]
    output: str
    limit: int
    signal_name: str
    signal_before: int
    job_id: int = 1
    _batch: Step | None = None
    _steps: set[Step] = field(default_factory=set)
    _requeued: bool = False

    def run(self, env: dict[str, str]) -> int:
        """Run the job, again when it is requeued, and return its status."""
        restarts = 0
        while True:
            self._requeued = False
            with NamespaceNodes(self.num_nodes, self.folder / str(restarts), [self.shared]) as nodes:
                for name in env.get("SLURM_STANDIN_CUT_OFF", "").split():
                    nodes[name].cut_off()
                status = self._run_once(nodes, env, restarts)
            if not self._requeued:
                return status
            restarts += 1

    def _run_once(self, nodes: NamespaceNodes, env: dict[str, str], restarts: int) -> int:
        batch_script = self.folder / str(restarts) / "slurm_script"
        batch_script.write_text(self.script)
        address = batch_script.with_name("socket")
        output = self.output.replace("%x", self.name).replace("%j", str(self.job_id))
        environment = env | {
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_JOB_NAME": self.name,
            "SLURM_JOB_NODELIST": f"node[1-{self.num_nodes}]" if self.num_nodes > 1 else "node1",
            "SLURM_JOB_NUM_NODES": str(self.num_nodes),
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_STANDIN_SOCKET": str(address),
        }
        broken = env.get("SLURM_STANDIN_BROKEN", "").split()
        with socket.socket(socket.AF_UNIX) as listener, open(output, "ab") as log:
            listener.bind(str(address))
            listener.listen()
            threading.Thread(target=self._serve, args=(listener, nodes, broken), daemon=True).start()
            command = ["bash", str(batch_script), *self.arguments]
            outputs = (log.fileno(), log.fileno())
            self._batch = Step(nodes["node1"], command, os.getcwd(), environment, *outputs)
            status = self._wait_for(self._batch)
        for step in list(self._steps):
            step.signal(signal.SIGKILL)
        return status

    def _wait_for(self, batch: Step) -> int:
        """Wait for the batch script with the time limit and a requeue in mind."""
        started = time.monotonic()
        told = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return batch.wait(timeout=0.1)
            elapsed = time.monotonic() - started
            if elapsed > self.limit - self.signal_before and not told:
                batch.signal(signal.Signals[f"SIG{self.signal_name}"], group=False)
                told = True
            if elapsed > self.limit or self._requeued:
                return self._end(batch)

    def _end(self, batch: Step) -> int:
        for step in (*list(self._steps), batch):
            step.signal(signal.SIGTERM, group=step is not batch)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return batch.wait(timeout=KILL_WAIT)
        batch.signal(signal.SIGKILL)
        return STATUS_OF_A_JOB_THAT_WAS_KILLED

    def _serve(self, listener: socket.socket, nodes: NamespaceNodes, broken: list[str]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the job has ended
                return
            threading.Thread(target=self._answer, args=(connection, nodes, broken), daemon=True).start()

    def _answer(self, connection: socket.socket, nodes: NamespaceNodes, broken: list[str]) -> None:
        """One srun, scontrol or scancel."""
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        lines = connection.makefile()
        request = json.loads(lines.readline())
        if "requeue" in request:
            self._requeued = True
            answer: dict[str, object] = {}
        elif "signal_batch" in request:
            assert self._batch is not None
            self._batch.signal(request["signal_batch"], group=False)
            answer = {}
        elif request["node"] in broken:
            answer = {"error": f"Task launch for StepId={self.job_id}.0 failed on node {request['node']}"}
        else:
            keys = ("command", "cwd", "env")
            step = Step(nodes[request["node"]], *(request[key] for key in keys), *descriptors)
            self._steps.add(step)
            threading.Thread(target=self._forward, args=(lines, step), daemon=True).start()
            answer = {"status": step.wait()}
            self._steps.discard(step)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # srun is gone
            connection.sendall(json.dumps(answer).encode() + b"\n")
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    @staticmethod
    def _forward(lines, step: Step) -> None:
        """Signals that srun got, to the step; its end is the step's."""
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                step.signal(json.loads(line)["signal"])
        step.signal(signal.SIGKILL)
