"""What is to be checked, a run, or without one this machine and the Ray cluster at RAY_ADDRESS; what a check
finds; and what the checks ask of the machine where they run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from verl.config import Config, SFTConfig, at
from verl.trainer.placement import needs_ray, num_processes, num_sampling
from verl.trainer.ppo.passes import Passes
from verl.utils.dataset.row_environments import searches

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")
TRIAL_BYTES = 64 * 1024  # enough to meet a quota that is used up, too little to be one's trouble


@dataclass(frozen=True)
class Finding:
    """One trouble: what is wrong, why it will hurt, what to do. No text ends in a full stop."""

    level: (
        str  # "error" (the run would fail, or work on the wrong thing) or "warning" (it will run, and hurt)
    )
    what: str
    why: str = ""
    do: str = ""
    check: str = ""  # name of the check that found it
    machines: tuple[str, ...] = ()  # those of the cluster that have it; empty: this one

    @property
    def line(self) -> str:
        """`error: [check] machines: what: why. Do: what to type`, on one line."""
        shown = ", ".join(self.machines[:4])
        more = f" and {len(self.machines) - 4} more" if len(self.machines) > 4 else ""
        where = f"{shown}{more}: " if shown else ""
        why = f": {self.why}" if self.why else ""
        do = f". Do: {self.do}" if self.do else ""
        return " ".join(f"{self.level}: [{self.check}] {where}{self.what}{why}{do}".split())


def error(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("error", what, why, do)


def warning(what: str, why: str = "", do: str = "") -> Finding:
    return Finding("warning", what, why, do)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """What several machines have in the same words becomes one finding; errors come first."""
    machines: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        alike = replace(finding, machines=())
        machines[alike] = machines.get(alike, ()) + finding.machines
    merged = [replace(finding, machines=names) for finding, names in machines.items()]
    return sorted(merged, key=lambda finding: finding.level)


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
    """The Ray that the run would use."""

    address: str | None  # RAY_ADDRESS
    started: tuple[str, ...] = ()  # addresses of clusters that `ray start` left here and that answer
    problem: str | None = None  # why the cluster at `address` can't be used
    nodes: tuple[RayNode, ...] = ()
    silent: tuple[str, ...] = ()  # nodes that did not run our task

    @property
    def alive(self) -> list[RayNode]:
        return [node for node in self.nodes if node.is_alive]


@dataclass(frozen=True)
class Target:
    """What the checks look at."""

    config: Config | SFTConfig | None  # of the run; None: none is meant
    probe: Any = None  # asks retrieval servers (`search_r1.search.probe`); None: they are not asked
    index_path: str | None = None  # an index that the retrieval server is to load on this machine
    is_thorough: bool = False  # also what takes seconds: GPUs by their driver, and the other nodes
    at_start: bool = False  # a run starts right after this; its settings are validated, their notes printed
    cluster: Cluster | None = None  # None where nothing needs Ray
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # of packages, by nodes that were asked
    notes: tuple[str, ...] = ()  # on keys of the command line that change nothing
    # absolute, by the driver: nodes have another working folder
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
        """State of each retrieval server of the run (`RetrievalProbe.servers`), as seen from this machine."""
        config = self.config
        if self.probe is None or not isinstance(config, Config) or not searches(config):
            return []
        block = config.retriever
        return self.probe.servers(block.url, block.topk, block.timeout, block.use_proxy)

    @property
    def needs_ray(self) -> bool:
        """A run that is on Ray; without a run: a cluster waits for one."""
        if self.config is None:
            return self.cluster is not None and bool(self.cluster.nodes)
        return needs_ray(self.config)

    @property
    def num_gpus_asked(self) -> int:
        """GPUs that the run can't do without: with one process `auto` takes what is there."""
        assert self.config is not None
        device = self.config.trainer.device
        processes = num_processes(self.config)
        optional = device == "cpu" or (device == "auto" and processes == 1)
        return 0 if optional else processes + num_sampling(self.config)

    @property
    def models(self) -> dict[str, str]:
        """Setting -> model (a folder, or owner/name on the hub), of those that the run loads, each once."""
        config = self.config
        if config is None:
            return {}
        if isinstance(config, SFTConfig):
            keys = ["model.partial_pretrain"]
        else:
            passes = Passes(config)
            keys = ["actor_rollout_ref.model.path"]
            keys += ["critic.model.path"] * passes.values
            keys += ["actor_rollout_ref.teacher.path"] * passes.teacher
        once: dict[str, str] = {}
        for key in keys:
            path = at(config, key)
            if path is not None and path not in once.values():  # null: the check of the settings says so
                once[key] = path
        return once

    @property
    def has_models(self) -> bool:
        """Whether all models are here, in a folder or in the hub's cache."""
        return None not in map(local_folder, self.models.values())


def local_folder(model: str) -> Path | None:
    """The files of a model: a folder, or those of the hub's cache; None: it would have to be fetched."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


# ------------------------------------------------------------------------------------------ this machine


@dataclass(frozen=True)
class Hardware:
    """device: "cuda" (every process has a GPU of its own) or "cpu" (a node's processes share its memory).

    device_bytes: of one GPU, or of a node's memory. source: where that number comes from, in words.
    """

    device: str
    device_bytes: int
    source: str

    @classmethod
    def of(cls, config: Config) -> Hardware:
        """What a run would have: GPUs of `trainer.dry_run_gpu_memory_gb`, else those of this machine.
        ValueError: GPUs are meant, none is here, and nothing says how much memory they have.
        """
        device = config.trainer.device
        gpu_memory_gb = config.trainer.dry_run_gpu_memory_gb
        import torch

        has_gpu = torch.cuda.is_available()
        if device == "cpu" or (device == "auto" and gpu_memory_gb is None and not has_gpu):
            return cls("cpu", memory_of_machine(), "the memory of this machine")
        if gpu_memory_gb is not None:
            return cls("cuda", int(gpu_memory_gb * GIB), "trainer.dry_run_gpu_memory_gb")
        if not has_gpu:
            raise ValueError(
                "trainer.device=cuda, but this machine has no GPU whose memory could be read; say how much "
                "the GPUs have that the run is for, for example trainer.dry_run_gpu_memory_gb=80"
            )
        properties = torch.cuda.get_device_properties(0)
        return cls("cuda", properties.total_memory, f"{properties.name} of this machine")


def memory_of_machine(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or a control group's limit below that.

    SLURM and systemd put jobs deep inside, and each group on the way up counts. v1 has a root of its own.
    """
    sizes = [psutil.virtual_memory().total]
    for line in read_text(own).splitlines():
        folder = Path(line.split(":", 2)[2])
        for inside in (folder, *folder.parents):
            for root, name in ((cgroups, "memory.max"), (cgroups / "memory", "memory.limit_in_bytes")):
                text = read_text(root / inside.relative_to("/") / name)
                sizes += [int(text)] if text.isdigit() else []
    return min(sizes)


def read_text(path: Path) -> str:
    """ "" where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def problem_of_writing(path: str | Path) -> str | None:
    """Why nothing can be written to a folder, or to its nearest parent that is there; None: it can."""
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
    """The folder, or its nearest parent that is there."""
    folder = Path(os.path.expanduser(path)).absolute()  # a user may have no home folder
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def port_holder(port: int) -> str | None:
    """Who listens on a port of this machine: "python3 (pid 77)"; None: nobody, or not to be seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return "a program of another user"
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None


def ray_folder() -> str:
    """Where Ray is told to put its files."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
