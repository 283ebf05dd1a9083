"""A real SLURM on one Linux machine: its daemons in namespaces as nodes, with a login node beside them.

    with SlurmCluster(tmp_path) as slurm:
        job = slurm.submit("first", "train.sbatch", "trainer.total_training_steps=2", flags=["--nodes=2"])
        job.wait_for_line("training: ", 300)
        assert job.wait_for_end(60) == "COMPLETED"

    login                  sbatch, squeue, scancel, scontrol; no daemon, no job
    node1                  slurmctld, slurmd
    node2, node3           slurmd
    this machine           munged, with a socket and a key of its own

All daemons run in the foreground, as children of this process, and end with the `with` block. There is no
accounting (slurmdbd), no cgroup and no GPU: files stand for the GPUs that SLURM counts, and it sets no
CUDA_VISIBLE_DEVICES for these.

Needs root and the packages slurm-wlm and munge: `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import namespace_nodes
import psutil
from namespace_nodes import NamespaceNodes, NodeProcess, changed_environment

COMPUTE_NODES = ["node1", "node2", "node3"]
LOGIN_NODE = "login"
GPUS_PER_NODE = 2
CPUS_PER_NODE = 8
_SECONDS_TO_START = 60
_SECONDS_BETWEEN_LOOKS = 0.3
_ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
}

# cred_expire is also how long a job waits that goes back into the queue; SLURM's own value is 120 s.
_SETTINGS = """
ClusterName=namespaces
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes} CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP
"""


@functools.cache
def missing() -> str | None:
    """Return why SLURM can't run on this machine, or None if it can."""
    for program in ("slurmctld", "slurmd", "sbatch", "srun", "munged"):
        if _path_of(program) is None:
            return f"the program {program} is not installed (Debian's packages slurm-wlm and munge)"
    return namespace_nodes.missing()


def _path_of(program: str) -> str | None:
    """Return the path of a program, which may be one of the administrator's."""
    return shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


def wait_until(condition: Callable[[], object], seconds: float, describe: Callable[[], str]) -> None:
    """Wait until a condition holds.

    Raises RuntimeError with `describe()` if it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {describe()}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


class SlurmCluster:
    """A cluster of three nodes and a login node; a `with` block that starts and ends it.

    Args:
        folder: the folder for all that the cluster and its nodes write. All nodes see it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.jobs: list[SlurmJob] = []
        self._slurm_folder = self.folder / "slurm"
        self._daemons: dict[str, NodeProcess] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        with contextlib.ExitStack() as stack:
            self._write_settings()
            self._start_munge(stack)
            nodes = NamespaceNodes([*COMPUTE_NODES, LOGIN_NODE], self.folder / "nodes", shared=[self.folder])
            self.nodes = stack.enter_context(nodes)
            self._daemons["slurmctld"] = self._start_daemon("node1", ["slurmctld", "-D"])
            for name in COMPUTE_NODES:
                self.start_slurmd(name)
            self.wait_until_idle()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_idle(self) -> None:
        """Wait until no node has a job, and all can have one."""
        wait_until(self._is_idle, _SECONDS_TO_START, self._describe)

    def submit(
        self, name: str, script: str, *arguments: str, flags: Sequence[str] = (), **variables: str | None
    ) -> SlurmJob:
        """Submit a script of scripts/slurm on the login node, with the tests' environment as the active one.

        Args:
            name: the name of the job and of its folder.
            script: the script, and `arguments` what it is given.
            flags: flags of sbatch.
            variables: variables of the environment of sbatch, which has few others; None takes one away.

        Raises RuntimeError if sbatch refuses it.
        """
        folder = self.folder / name
        folder.mkdir()
        environment: dict[str, str | None] = {
            "VIRTUAL_ENV": sys.prefix,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin:/usr/sbin:/sbin",
            "LOG_DIR": str(folder / "logs"),
            "EXPERIMENT_NAME": f"test-slurm-{name}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= variables
        output = folder / "job.log"
        command = ["sbatch", "--parsable", f"--job-name={name}", f"--output={output}", *flags]
        job_id = self.command([*command, f"scripts/slurm/{script}", *arguments], environment).strip()
        job = SlurmJob(self, int(job_id), folder, output)
        self.jobs.append(job)
        return job

    def command(self, command: Sequence[str], environment: dict[str, str | None] | None = None) -> str:
        """Run a command on the login node, in the repository, and return its output.

        It has the variables in `environment` and nothing else of this process's. RuntimeError if it fails.
        """
        variables: dict[str, str | None] = dict.fromkeys(os.environ)
        variables |= {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/root"), "USER": "root"}
        variables |= self._variables() | (environment or {})
        result = subprocess.run(
            self.nodes[LOGIN_NODE].enter(command),
            env=changed_environment(variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr}{result.stdout}")
        return result.stdout

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node."""
        self._daemons[name] = self._start_daemon(name, ["slurmd", "-D", "-N", name])

    def stop_slurmd(self, name: str) -> None:
        """End the daemon of a node. The node's jobs go on."""
        daemon = self._daemons.pop(name)
        daemon.terminate()
        daemon.wait(30)

    def processes_of_jobs(self) -> list[psutil.Process]:
        """Return all processes on compute nodes that jobs have started, and SLURM's own for jobs."""
        processes = []
        for name in COMPUTE_NODES:
            for process in psutil.Process(self.nodes[name].pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        processes.append(process)
        return processes

    def _variables(self) -> dict[str, str | None]:
        return {"SLURM_CONF": str(self._slurm_folder / "slurm.conf")}

    def _start_daemon(self, name: str, command: list[str]) -> NodeProcess:
        program = _path_of(command[0])
        assert program is not None  # missing() has looked
        return self.nodes[name].start([program, *command[1:]], self._variables())

    def _write_settings(self) -> None:
        folder = self._slurm_folder
        for name in ("state", *(f"spool-{node}" for node in COMPUTE_NODES)):
            (folder / name).mkdir(parents=True)
        for number in range(GPUS_PER_NODE):
            (folder / f"gpu{number}").touch()
        nodes = ",".join(COMPUTE_NODES)
        settings = _SETTINGS.format(folder=folder, nodes=nodes, cpus=CPUS_PER_NODE, gpus=GPUS_PER_NODE)
        (folder / "slurm.conf").write_text(settings)
        gpus = f"NodeName={nodes} Name=gpu File={folder}/gpu[0-{GPUS_PER_NODE - 1}]\n"
        (folder / "gres.conf").write_text(gpus)

    def _start_munge(self, stack: contextlib.ExitStack) -> None:
        """Start munged, which vouches for users, with files of its own."""
        folder = self._slurm_folder
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        program = _path_of("munged")
        assert program is not None
        command = [program, "--foreground", "--force", "--num-threads=2", f"--key-file={key}"]
        for kind in ("socket", "pid", "log", "seed"):
            flag = "--socket" if kind == "socket" else f"--{kind}-file"
            command.append(f"{flag}={folder}/munge.{kind}")
        log = stack.enter_context((folder / "munged.out").open("wb"))
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(_end, daemon)
        socket = folder / "munge.socket"
        wait_until(socket.exists, _SECONDS_TO_START, (folder / "munged.out").read_text)

    def _is_idle(self) -> bool:
        """Return whether all nodes wait for jobs. It is not an error while the controller starts."""
        try:
            states = self.command(["sinfo", "--noheader", "--Node", "--format=%T"]).split()
        except RuntimeError:
            return False
        return states == ["idle"] * len(COMPUTE_NODES)

    def _describe(self) -> str:
        logs = sorted(self._slurm_folder.glob("*.log"))
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


class SlurmJob:
    """A job that was submitted, with `id`, the file of its `output`, and its `logs` folder."""

    def __init__(self, cluster: SlurmCluster, job_id: int, folder: Path, output: Path) -> None:
        self.cluster = cluster
        self.id = job_id
        self.folder = folder
        self.logs = folder / "logs"
        self._output = output

    def output(self) -> str:
        """Return what the batch script has written so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def log(self, name: str) -> str:
        """Return a log that the job has written so far, such as training.log."""
        path = self.logs / name
        return path.read_text(errors="replace") if path.exists() else ""

    def properties(self) -> dict[str, str]:
        """Return what SLURM knows of the job, such as JobState, Reason and ExitCode."""
        shown = self.cluster.command(["scontrol", "--oneliner", "show", "job", str(self.id)])
        pairs = (word.partition("=") for word in shown.split())
        return {name: value for name, _, value in pairs}

    def state(self) -> str:
        """Return the job's state, such as RUNNING."""
        return self.properties()["JobState"]

    def has_ended(self) -> bool:
        """Return whether the job has ended for good."""
        return self.state() in _ENDED

    def wait_for_end(self, seconds: float) -> str:
        """Wait until the job has ended, and return its last state."""
        wait_until(self.has_ended, seconds, self.describe)
        return self.state()

    def exit_status(self) -> int:
        """Return the status with which the batch script has ended."""
        return int(self.properties()["ExitCode"].split(":")[0])

    def wait_for(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until a condition holds. RuntimeError if it does not in time, or if the job ends before."""
        wait_until(lambda: condition() or self.has_ended(), seconds, self.describe)
        if not condition():
            raise RuntimeError(f"the job has ended too early\n{self.describe()}")

    def wait_for_line(self, pattern: str, seconds: float, log: str | None = None) -> list[str]:
        """Wait until a line is in the job's output, and return what the pattern and its groups match.

        Args:
            pattern: a regular expression.
            seconds: how long to wait; RuntimeError after that, or when the job ends without it.
            log: the name of one of its logs in place of its output.
        """

        def match() -> re.Match[str] | None:
            return re.search(pattern, self.output() if log is None else self.log(log))

        self.wait_for(match, seconds)
        result = match()
        assert result is not None
        return [result[0], *result.groups()]

    def cancel(self, *flags: str) -> None:
        """Cancel the job, or signal it with flags such as --signal=USR1."""
        self.cluster.command(["scancel", *flags, str(self.id)])

    def processes(self, module: str) -> list[psutil.Process]:
        """Return the processes of the job that run a Python module, such as verl.trainer.main_ppo."""
        running = []
        for process in self.cluster.processes_of_jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_of_job = process.environ().get("SLURM_JOB_ID") == str(self.id)
                if is_of_job and module in process.cmdline():
                    running.append(process)
        return running

    def describe(self) -> str:
        """Return all that helps to see what a job did: its state, its output and the ends of its logs."""
        logs = sorted(self.logs.glob("*.log"))
        texts = [f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
        return "\n".join([f"job {self.id} is {self.state()}", self.output()[-5000:], *texts])


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """End a process that was started here."""
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
