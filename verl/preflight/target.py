"""The target of the checks, their findings, and what they ask of the machine where they run.

The target is a run. Without a run it is this machine and the Ray cluster at RAY_ADDRESS.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from verl.config import Config, SFTConfig, get_value
from verl.data.row_environments import searches
from verl.planning.passes import Passes
from verl.planning.placement import gpus_of_sampling, needs_ray, num_processes
from verl.utils.hub import local_folder

TRIAL_BYTES = 64 * 1024  # enough to run into a quota that is used up, and too little to cause trouble itself


@dataclass(frozen=True)
class Finding:
    """One trouble: what is wrong, why it will hurt, and what to do.

    No text ends in a full stop.

    Attributes:
        level: "error" if the run would fail or work on the wrong thing, "warning" if it will run, and hurt.
        what: What is wrong.
        why: Why it will hurt.
        do: What to do.
        check: The name of the check that found it.
        machines: The machines of the cluster that have the trouble. Empty for this machine.
        exclude: The name of a node that a job should leave out. It is empty if the node is usable.
    """

    level: str
    what: str
    why: str = ""
    do: str = ""
    check: str = ""
    machines: tuple[str, ...] = ()
    exclude: str = ""

    @property
    def line(self) -> str:
        """Return the finding on one line, as `error: [check] machines: what: why. Do: what to type`."""
        shown = ", ".join(self.machines[:4])
        others = f" and {len(self.machines) - 4} more" if len(self.machines) > 4 else ""
        where = f"{shown}{others}: " if shown else ""
        why = f": {self.why}" if self.why else ""
        do = f". Do: {self.do}" if self.do else ""
        return " ".join(f"{self.level}: [{self.check}] {where}{self.what}{why}{do}".split())


def error(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("error", what, why, do)


def warning(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("warning", what, why, do)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that several machines have in the same words.

    In the result errors come first.
    """
    machines: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        alike = replace(finding, machines=())
        machines[alike] = machines.get(alike, ()) + finding.machines
    merged = [replace(finding, machines=names) for finding, names in machines.items()]
    return sorted(merged, key=lambda finding: finding.level)


def exclude_line(findings: Iterable[Finding]) -> str:
    """Return the command by which a SLURM job leaves out nodes with broken hardware, or "" if none is."""
    nodes = sorted({finding.exclude for finding in findings if finding.exclude})
    return f"leave these nodes out: sbatch --exclude={','.join(nodes)} ..." if nodes else ""


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster lists it."""

    name: str
    address: str
    num_cpus: float
    num_gpus: float
    is_alive: bool


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that the run would use.

    Attributes:
        address: The value of RAY_ADDRESS.
        started: The addresses of clusters that `ray start` has written on this machine, and that answer.
        problem: The reason why the cluster at `address` can't be used.
        nodes: The nodes of the cluster.
        silent: The names of nodes that did not run our task.
    """

    address: str | None
    started: tuple[str, ...] = ()
    problem: str | None = None
    nodes: tuple[RayNode, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def alive(self) -> list[RayNode]:
        return [node for node in self.nodes if node.is_alive]


@dataclass(frozen=True)
class Target:
    """The target of the checks.

    Attributes:
        config: The configuration of the run. None without a run.
        probe: Asks retrieval servers (the hook `retrieval_probe`). None to ask none.
        index_path: An index that the retrieval server is to load on this machine.
        is_thorough: Whether to make also the checks that take seconds: of GPUs by their driver, and of the
            other nodes.
        at_start: Whether a run starts right after the checks. Its settings have then been validated, and the
            notes on them printed.
        cluster: The Ray cluster. None if nothing needs Ray.
        versions: The versions of packages on each node that was asked.
        notes: Notes on keys of the command line that change nothing.
        at_login: Whether this machine only submits the run as a job. Its GPUs, memory, limits and cards, Ray,
            and the servers, which the job starts, are not looked at.
        retrieval_args: The flags of the retrieval servers that the job is to start (RETRIEVAL_ARGS).
        retrieval_python: The Python of their environment.
        more_models: Further models of the job, by the flags that name them.
        run_folder: The folder of the run. The driver makes its path absolute, because nodes have another
            working folder.
        model_folders: The folders of the models, as absolute paths for the same reason.
    """

    config: Config | SFTConfig | None
    probe: Any = None
    index_path: str | None = None
    is_thorough: bool = False
    at_start: bool = False
    cluster: Cluster | None = None
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    at_login: bool = False
    retrieval_args: tuple[str, ...] = ()
    retrieval_python: str = sys.executable
    more_models: Mapping[str, str] = field(default_factory=dict)
    run_folder: str = field(init=False, default="")
    model_folders: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.config is not None:
            folder = Path(self.config.trainer.default_local_dir).expanduser().absolute()
            models = [str(Path(path).absolute()) for path in self.models.values() if Path(path).is_dir()]
            object.__setattr__(self, "run_folder", str(folder))
            object.__setattr__(self, "model_folders", tuple(models))

    @cached_property
    def servers(self) -> Sequence[Any]:
        """Return the state of each retrieval server of the run as seen from this machine.

        It is the result of `RetrievalProbe.servers`.
        """
        config = self.config
        if self.probe is None or not isinstance(config, Config) or not searches(config):
            return []
        block = config.retriever
        return self.probe.servers(block.url, block.topk, block.timeout, block.use_proxy)

    @property
    def needs_ray(self) -> bool:
        """Return whether the run is on Ray, or without a run, whether a cluster has nodes."""
        if self.config is None:
            return self.cluster is not None and bool(self.cluster.nodes)
        return needs_ray(self.config)

    @cached_property
    def num_gpus_asked(self) -> int:
        """Return the number of GPUs that the run can't do without.

        With one process, `trainer.device=auto` needs none, because it takes what the machine has. Those of
        rollouts apart are left out if the model can't be read here, by whose size they are counted.
        """
        assert self.config is not None
        device = self.config.trainer.device
        processes = num_processes(self.config)
        if device == "cpu" or (device == "auto" and processes == 1):
            return 0
        try:
            is_readable = bool(self.models) and self.has_models
            return processes + (gpus_of_sampling(self.config) if is_readable else 0)
        except ValueError:  # Other checks say what is wrong with the settings or the model.
            return processes

    @property
    def models(self) -> dict[str, str]:
        """Return the models that the run loads, each once, by their settings.

        A model is a folder, or owner/name on the hub.
        """
        config = self.config
        if config is None:
            return {}
        if isinstance(config, SFTConfig):
            keys = ["model.partial_pretrain"]
        else:
            passes = Passes(config)
            keys = ["actor_rollout_ref.model.path"]
            keys += ["critic.model.path"] * passes.needs_values
            keys += ["actor_rollout_ref.teacher.path"] * passes.needs_teacher
        once: dict[str, str] = {}
        for key in keys:
            path = get_value(config, key)
            # If the path is null, the check of the settings says so.
            if path is not None and path not in once.values():
                once[key] = path
        return once

    @cached_property
    def models_of_job(self) -> dict[str, str]:
        """Return `models`, those of the job's retrieval servers, and `more_models`."""
        return {**self.models, **self.models_of_servers, **self.more_models}

    @property
    def models_of_servers(self) -> dict[str, str]:
        """Return the encoders and the reranker of the retrieval servers that the job starts.

        They are those of flags that can work. For others there is a check.
        """
        if self.probe is None or not self.retrieval_args:
            return {}
        with suppress(ValueError):
            return self.probe.models_of_flags(self.retrieval_args)
        return {}

    @property
    def has_models(self) -> bool:
        """Return whether all models are on this machine, in a folder or in the hub's cache."""
        return None not in map(local_folder, self.models.values())


# ------------------------------------------------------------------------------------------ this machine


def write_problem(path: str | Path) -> str | None:
    """Return why nothing can be written to a folder, or None if it can be written to.

    If the folder does not exist, its nearest parent that exists is tried.
    """
    folder = existing_parent(path)
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight_") as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def existing_parent(path: str | Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    # A user may have no home folder. os.path.expanduser then leaves the path as it is.
    folder = Path(os.path.expanduser(path)).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def port_holder(port: int) -> str | None:
    """Return who listens on a port of this machine, such as "python3 (pid 77)".

    Returns None if nobody does, or if this user can't see it.
    """
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return "a program of another user"
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None


def ray_folder() -> str:
    """Return the folder in which Ray is told to put its files."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
