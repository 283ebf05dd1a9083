"""Where Ray keeps its sockets, logs and spilled objects: a local file system, by a short path.

Sockets and file locks fail or hang on a network file system, and a Unix socket's path has at most 107 bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs4?|cifs|smb(3|fs)|lustre|gpfs|beegfs|ceph|glusterfs|panfs|wekafs|afs|9p|pvfs2|"
    r"fuse\.(glusterfs|sshfs|ceph|s3fs|gcsfuse)"
)
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# 107 bytes less what Ray appends
LONGEST_FOLDER = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.99")


def trouble_with(folder: str, mounts: Sequence[str] | None = None) -> str | None:
    """Why Ray can't work below `folder`; None if it can. `mounts`: lines of /proc/mounts."""
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text().splitlines() if table.exists() else []
    real = os.path.realpath(folder) + "/"
    every = [
        (point.replace("\\040", " "), kind) for _, point, kind in (line.split(" ")[:3] for line in mounts)
    ]
    holding = [(point, kind) for point, kind in every if real.startswith(point.rstrip("/") + "/")]
    # of several at one point the last counts, such as what autofs mounted over itself
    kind = max(reversed(holding), key=lambda mount: len(mount[0]))[1] if holding else ""
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        return f"is on a network file system ({kind}), where Ray's sockets and locks don't work"
    if len(os.fsencode(os.path.abspath(folder))) > LONGEST_FOLDER:
        return f"has a path of more than {LONGEST_FOLDER} bytes, too long for the sockets below it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "can't be written" if os.path.isdir(folder) else "does not exist"
    return None


def choose_temp_dir(mounts: Sequence[str] | None = None) -> tuple[str, str | None]:
    """Ray's own folder on this machine, and a line to say if it is not where TMPDIR points.

    RAY_TMPDIR is the user's word; TMPDIR is used if Ray can work there, else /tmp, /var/tmp or /dev/shm.

    Raises:
        ValueError: RAY_TMPDIR can't be used, or nothing can.
    """
    wanted = os.environ.get("RAY_TMPDIR")
    usual = wanted or os.environ.get("TMPDIR") or LOCAL_FOLDERS[0]
    why = trouble_with(usual, mounts)
    if why is None:
        return os.path.join(usual, "ray"), None
    advice = "Set RAY_TMPDIR to a folder on a local disk with a short path, such as /tmp."
    if wanted:
        raise ValueError(f"RAY_TMPDIR={wanted} {why}. {advice}")
    for folder in LOCAL_FOLDERS:
        if trouble_with(folder, mounts) is None:
            return os.path.join(folder, "ray"), f"Ray works in {folder}/ray: {usual} {why}"
    raise ValueError(f"{usual} {why}, and {', '.join(LOCAL_FOLDERS)} can't be used either. {advice}")
