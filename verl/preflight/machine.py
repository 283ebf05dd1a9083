"""What the checks ask of the machine where they run: memory, folders that can be written, ports."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
TRIAL_BYTES = 64 * 1024  # enough to meet a quota that is used up, too little to be one's trouble


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
