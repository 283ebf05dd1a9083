"""init_ray, a Ray runtime for the time of a run: the cluster at RAY_ADDRESS, or one on this machine.

    RAY_ADDRESS=host:port   the cluster whose head node listens there
    RAY_ADDRESS=auto        the cluster that a node on this machine belongs to
    unset                   a cluster of this machine alone, started here and ended with the run

The driver runs where it was started. That machine must be a node of the cluster, since Ray reaches its driver
through the node's own processes. If an address is wrong, a line says why within seconds.

Ray keeps its sockets, logs and spilled objects on a local file system, by a short path (`choose_temp_dir`):
sockets and file locks fail or hang on a network file system, and a socket's path has at most 107 bytes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.utils import get_num_cpus
from ray.exceptions import RpcError

from verl.single_controller.ray.agent_ports import fixed_agent_ports
from verl.single_controller.ray.environment import RAY_SETTINGS

_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_GIVE_UP_A_NAME = 60.0  # how long a process that was killed may keep its name
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4  # type of the frame that a gRPC server sends first; the type is a frame's fourth byte
_ADVICE = (
    "Start a head node with `bash scripts/ray_node.sh head`, or unset RAY_ADDRESS to use this machine alone"
)
_NO_HEAD = (
    "RAY_ADDRESS={address}: what answers there is no Ray head node (its port is 6379 unless it was started "
    f"with --port). {_ADVICE}."
)
CORES_VARIABLE = "RAY_NUM_CPUS"
MOST_CORES = 64  # that Ray counts on a machine by itself
LINES_KEPT = 20
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs4?|cifs|smb(3|fs)|lustre|gpfs|beegfs|ceph|glusterfs|panfs|wekafs|afs|9p|pvfs2|"
    r"fuse\.(glusterfs|sshfs|ceph|s3fs|gcsfuse)"
)
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# Bytes: the 107 that a socket's path has at most, less what Ray appends.
LONGEST_FOLDER = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.99")


class RaySession:
    """A session of Ray, to be ended by a `with` block or by `finally: session.shutdown()`."""

    def __init__(self, owned: bool) -> None:
        self._owned = owned

    def shutdown(self) -> None:
        """Disconnect, and end a cluster that `init_ray` started; a second call does nothing."""
        if self._owned:
            self._owned = False
            ray.shutdown()

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def cores_for_ray() -> int:
    """Return the number of cores of this machine that Ray is to count.

    It is RAY_NUM_CPUS, or else the cores that this process may use: by its affinity, its control groups and
    SLURM. Ray starts a process for each core that it counts, and a run needs few of them, so they are at most
    MOST_CORES (a GH200 says 288).

    Raises:
        ValueError: if RAY_NUM_CPUS is no number of cores.
    """
    text = os.environ.get(CORES_VARIABLE, "")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"Found {CORES_VARIABLE}={text}; expected a number of cores, such as 16.")
        return int(text)
    counts = [MOST_CORES, len(os.sched_getaffinity(0)), int(get_num_cpus(override_docker_cpu_warning=True))]
    of_job = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if of_job.isdecimal():
        counts.append(int(of_job))
    return max(1, min(counts))


def init_ray(num_cpus: int | None = None, log_to_driver: bool = True) -> RaySession:
    """Connect to the cluster at RAY_ADDRESS if that is set, or else start one on this machine.

    If the process is connected already, that connection is used and left open.

    Args:
        num_cpus: CPUs that a cluster started here offers; None for `cores_for_ray`. It is a count
            for scheduling; processes may be more.
        log_to_driver: whether the actors' output is shown here.

    Raises:
        ValueError: if nobody answers at RAY_ADDRESS, this machine is no node of that cluster, or Ray finds no
            place for its files.
    """
    if ray.is_initialized():
        return RaySession(owned=False)
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {}
    if address == "local":
        temp_dir, note = choose_temp_dir()
        if note is not None:
            print(f"note: {note}", file=sys.stderr)
        num_cpus = num_cpus or cores_for_ray()
        options = {"num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": temp_dir}
        advice = f"The machine may be too busy (Ray waits 30 s); its logs: {temp_dir}/session_latest/logs"
    else:
        advice = _ADVICE
        if address != "auto":
            check_address(address)
    # Ray sets a handler of its own, which ends the program.
    answer_to_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with fixed_agent_ports():
            ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING, **options)
    except Exception as error:  # no cluster, one of another version, or processes that don't start in time
        failure = "Ray did not start on this machine" if address == "local" else f"RAY_ADDRESS={address}"
        raise ValueError(f"{failure}: {' '.join(str(error).split())} {advice}.") from error
    finally:
        if callable(answer_to_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer_to_sigterm)
    if log_to_driver:
        _keep_last_lines()
    return RaySession(owned=True)


def check_address(address: str) -> None:
    """Raise ValueError, with the reason, if no Ray head node answers at host:port."""
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address} is for Ray Client, whose driver stands outside of the cluster. Start the "
            "run on a node of the cluster with RAY_ADDRESS=<head node>:6379, or send it there with "
            "`ray job submit`."
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"RAY_ADDRESS={address}: expected host:port (of the head node) or auto")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER
        ) as connection:
            connection.sendall(_HTTP2_HELLO)
            answer = connection.recv(9)
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray head node answers there ({error}). {_ADVICE}."
        ) from error
    if len(answer) < 4 or answer[3] != _HTTP2_SETTINGS:
        raise ValueError(_NO_HEAD.format(address=address))


def list_nodes(address: str) -> list[Any]:
    """Return Ray's record of each node of the cluster at host:port, dead ones too (state: 0 is alive).

    Raises ValueError if no Ray head node answers there.
    """
    check_address(address)
    # This is the client that `ray status` uses; there is no public one.
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        return list(GcsClient(address=address).get_all_node_info(timeout=_SECONDS_TO_ANSWER).values())
    except RpcError as error:
        raise ValueError(_NO_HEAD.format(address=address)) from error


def names_in(namespace: str) -> list[str]:
    """Return the names of the living actors in a namespace of Ray."""
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == namespace]


def wait_until_free(namespace: str, names: Sequence[str]) -> None:
    """Wait until no actor has these names: an actor that was killed keeps its name for a moment.

    Raises ValueError if one keeps it.
    """
    due = time.monotonic() + _SECONDS_TO_GIVE_UP_A_NAME
    while taken := set(names) & set(names_in(namespace)):
        if time.monotonic() > due:
            raise ValueError(
                f"Found {', '.join(sorted(taken))} in Ray's namespace {namespace} already; expected no other "
                "run in the same folder. End it, or set trainer.default_local_dir to another folder."
            )
        time.sleep(0.1)


_LAST_LINES: dict[tuple[str, int], deque[str]] = defaultdict(lambda: deque(maxlen=LINES_KEPT))


def last_lines_seen(address: str, pid: int) -> list[str]:
    """Return the last lines that a process of the cluster wrote, as far as this driver has received them."""
    return list(_LAST_LINES.get((address, pid), ()))


def _keep_last_lines() -> None:
    """Keep the end of what each process writes: it is all that can be had of a node that is lost."""
    from ray._private import ray_logging  # where the driver prints the actors' output; nothing public has it

    def keep(data: dict[str, Any]) -> None:
        if (pid := str(data["pid"])).isdigit():  # not the raylet and the autoscaler
            _LAST_LINES[data["ip"], int(pid)].extend(data["lines"])

    ray_logging.global_worker_stdstream_dispatcher.add_handler("last lines", keep)


def receive_lines() -> None:
    """Have this actor receive what the processes of its job write, as Ray has a driver do.

    They are kept for `last_lines_seen`; the driver alone shows them.
    """
    # Ray does this for drivers in `connect`, and nothing public does it for actors.
    from ray._raylet import GcsLogSubscriber  # type: ignore[attr-defined]

    worker: Any = ray._private.worker.global_worker
    worker.gcs_log_subscriber = GcsLogSubscriber(
        worker_id=worker.worker_id, address=worker.gcs_client.address
    )
    threading.Thread(target=worker.print_logs, name="lines of workers", daemon=True).start()
    _keep_last_lines()


def why_unusable(folder: str, mounts: Sequence[str] | None = None) -> str | None:
    """Return why Ray can't work below `folder`, or None if it can.

    Args:
        folder: the folder.
        mounts: lines of /proc/mounts; None for those of this machine.
    """
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text().splitlines() if table.exists() else []
    real_path = os.path.realpath(folder) + "/"
    all_mounts = [
        (point.replace("\\040", " "), kind) for _, point, kind in (line.split(" ")[:3] for line in mounts)
    ]
    mounts_above = [
        (point, kind) for point, kind in all_mounts if real_path.startswith(point.rstrip("/") + "/")
    ]
    # Of several mounts at one point the last counts, such as what autofs mounted over itself.
    kind = max(reversed(mounts_above), key=lambda mount: len(mount[0]))[1] if mounts_above else ""
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        return f"is on a network file system ({kind}), where Ray's sockets and locks don't work"
    if len(os.fsencode(os.path.abspath(folder))) > LONGEST_FOLDER:
        return f"has a path of more than {LONGEST_FOLDER} bytes, too long for the sockets below it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "can't be written" if os.path.isdir(folder) else "does not exist"
    return None


def choose_temp_dir(mounts: Sequence[str] | None = None) -> tuple[str, str | None]:
    """Return Ray's own folder on this machine, and a line to print if it is not where TMPDIR points.

    RAY_TMPDIR is always used if it is set. TMPDIR is used if Ray can work there, or else /tmp, /var/tmp or
    /dev/shm.

    Args:
        mounts: lines of /proc/mounts; None for those of this machine.

    Raises:
        ValueError: if RAY_TMPDIR can't be used, or no folder can.
    """
    ray_tmpdir = os.environ.get("RAY_TMPDIR")
    usual = ray_tmpdir or os.environ.get("TMPDIR") or LOCAL_FOLDERS[0]
    reason = why_unusable(usual, mounts)
    if reason is None:
        return os.path.join(usual, "ray"), None
    advice = "Set RAY_TMPDIR to a folder on a local disk with a short path, such as /tmp."
    if ray_tmpdir:
        raise ValueError(f"RAY_TMPDIR={ray_tmpdir} {reason}. {advice}")
    for folder in LOCAL_FOLDERS:
        if why_unusable(folder, mounts) is None:
            return os.path.join(folder, "ray"), f"Ray works in {folder}/ray: {usual} {reason}"
    raise ValueError(f"{usual} {reason}, and {', '.join(LOCAL_FOLDERS)} can't be used either. {advice}")
