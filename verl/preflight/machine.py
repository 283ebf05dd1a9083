"""The machine where this runs: its limits, network cards, folders, GPUs, and the servers it reaches."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from verl.preflight.target import Target

CGROUPS = Path("/sys/fs/cgroup")
VIRTUAL_CARDS = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "cali",
    "tun",
    "tap",
    "wg",
    "podman",
    "lxc",
)
TRIAL_BYTES = 64 * 1024  # enough to meet a quota that is used up, too little to be one's trouble


class Machine:
    """What a run would find on this machine; each thing is looked at when a check asks for it."""

    def __init__(self, target: Target) -> None:
        self.target, self.environment = target, dict(os.environ)

    @cached_property
    def servers(self) -> Sequence[Any]:
        """State of each retrieval server of the run (`RetrievalProbe.servers`), as seen from here."""
        probe = self.target.probe
        if probe is None or self.target.config is None or not self.target.searches:
            return []
        block = self.target.config.retriever
        return probe.servers(block.url, block.topk, block.timeout, block.use_proxy)

    @cached_property
    def num_cpus(self) -> float:
        """Cores that this process may use: affinity and control groups heeded."""
        return min([float(len(os.sched_getaffinity(0))), *cpu_quotas()])

    @cached_property
    def cards(self) -> dict[str, str]:
        """Network card -> address, of those that are up, virtual ones included; without the loopback."""
        states, cards = psutil.net_if_stats(), {}
        for name, addresses in sorted(psutil.net_if_addrs().items()):
            reached = [a.address for a in addresses if a.family.name in ("AF_INET", "AF_INET6")]
            reached = [address for address in reached if not address.startswith("fe80")]
            if name != "lo" and name in states and states[name].isup and reached:
                cards[name] = reached[0]
        return cards

    @cached_property
    def ray_folder(self) -> str:
        """Where Ray is told to put its files."""
        return self.environment.get("RAY_TMPDIR") or self.environment.get("TMPDIR") or "/tmp"

    @cached_property
    def cpus_of_ray(self) -> float:
        """Cores that Ray counts here: those of this node in the cluster, else what it would count."""
        from ray._private.utils import get_num_cpus

        own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
        nodes = self.target.cluster.alive if self.target.cluster is not None else []
        listed = [node.num_cpus for node in nodes if node.address in own]
        return listed[0] if listed else float(get_num_cpus(override_docker_cpu_warning=True))

    @cached_property
    def num_gpus(self) -> int:
        return torch.cuda.device_count()  # asks the driver's library, without starting CUDA


# -------------------------------------------------------------------------------- cores and memory
# A limit may be set on any control group between this process and the root (SLURM and systemd put jobs deep
# inside), so each on the way up counts, of both versions of control groups.


def cpu_quotas(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Cores that the control groups of this process allow."""
    quotas = []
    for folder in _groups("cpu", cgroups, own):
        words = _text(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(word.isdigit() and int(word) for word in words):  # else "max", -1, or no such file
            quotas.append(int(words[0]) / int(words[1]))
    return quotas


def memory_of_machine(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or a control group's limit below that."""
    sizes = [psutil.virtual_memory().total]
    for folder in _groups("memory", cgroups, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := _text(folder / name)).isdigit():
                sizes.append(int(text))
    return min(sizes)


def _groups(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            roots = [cgroups, cgroups / "unified"]
        elif controller in names.split(","):
            roots = [cgroups / controller, cgroups / names]
        else:
            continue
        for root in dict.fromkeys(roots):
            folder = root / path.lstrip("/")
            while folder != root.parent:
                yield folder
                folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# -------------------------------------------------------------------------------- folders and ports


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


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Of the NVIDIA kernel module, as 580.82.07; None without one."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", _text(file) + " ")
    return match.group(1) if match else None
