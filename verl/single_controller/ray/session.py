"""init_ray: a Ray runtime for the time of a run: the cluster at RAY_ADDRESS, or one on this machine.

    RAY_ADDRESS=host:port   the cluster whose head node listens there
    RAY_ADDRESS=auto        the cluster that a node on this machine belongs to
    unset                   a cluster of this machine alone, started here and ended with the run

The driver runs where it was started, and that machine must be a node of the cluster: Ray reaches its driver
through the node's own processes. What is wrong with an address is said within seconds, in one line.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import defaultdict, deque
from typing import Any

import ray
from ray.exceptions import RpcError

from verl.single_controller.ray.environment import RAY_SETTINGS
from verl.single_controller.ray.temp_dir import choose_temp_dir

_SECONDS_TO_ANSWER = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4  # type of the frame that a gRPC server sends first; the type is a frame's fourth byte
_ADVICE = (
    "Start a head node with `bash scripts/ray_node.sh head`, or unset RAY_ADDRESS to use this machine alone"
)
_NO_HEAD = (
    "RAY_ADDRESS={address}: what answers there is no Ray head node (its port is 6379 unless it was started "
    f"with --port). {_ADVICE}."
)
LINES_KEPT = 20


class RaySession:
    """A `with` block (or a `finally: session.shutdown()`) around the use of Ray."""

    def __init__(self, owned: bool) -> None:
        self._owned = owned

    def shutdown(self) -> None:
        """Disconnects; a cluster that `init_ray` started ends. A second call does nothing."""
        if self._owned:
            self._owned = False
            ray.shutdown()

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def init_ray(num_cpus: int | None = None, log_to_driver: bool = True) -> RaySession:
    """Connects to the cluster at RAY_ADDRESS if that is set, else starts one on this machine.

    `num_cpus` is what a cluster started here offers (None: the cores of the machine); it is a count for
    scheduling, processes may be more. `log_to_driver` shows the actors' output here. If the process is
    connected already, that connection is used and left open.

    Raises:
        ValueError: nobody answers at RAY_ADDRESS, this machine is no node of that cluster, or Ray finds no
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
        options = {"num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": temp_dir}
        advice = f"The machine may be too busy (Ray waits 30 s); its logs: {temp_dir}/session_latest/logs"
    else:
        advice = _ADVICE
        if address != "auto":
            check_address(address)
    answer_to_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own, which ends the program
    try:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING, **options)
    except Exception as error:  # no cluster, one of another version, or processes that don't come up in time
        what = "Ray did not start on this machine" if address == "local" else f"RAY_ADDRESS={address}"
        raise ValueError(f"{what}: {' '.join(str(error).split())} {advice}.") from error
    finally:
        if callable(answer_to_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer_to_sigterm)
    if log_to_driver:
        _keep_last_lines()
    return RaySession(owned=True)


def check_address(address: str) -> None:
    """Whether a Ray head node answers at host:port. ValueError with the reason if not."""
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
    """Ray's record of each node of the cluster at host:port, dead ones too (state: 0 is alive).

    Raises:
        ValueError: no Ray head node answers there.
    """
    check_address(address)
    # the client that `ray status` uses; there is no public one
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        return list(GcsClient(address=address).get_all_node_info(timeout=_SECONDS_TO_ANSWER).values())
    except RpcError as error:
        raise ValueError(_NO_HEAD.format(address=address)) from error


_LAST_LINES: dict[tuple[str, int], deque[str]] = defaultdict(lambda: deque(maxlen=LINES_KEPT))


def last_lines_seen(address: str, pid: int) -> list[str]:
    """The last lines that a process of the cluster wrote, as far as they have come to this driver."""
    return list(_LAST_LINES.get((address, pid), ()))


def _keep_last_lines() -> None:
    """Keep the end of what each process writes: of a node that is lost it is all that can be had."""
    from ray._private import ray_logging  # where the driver prints the actors' output; nothing public has it

    def keep(data: dict[str, Any]) -> None:
        if (pid := str(data["pid"])).isdigit():  # not the raylet and the autoscaler
            _LAST_LINES[data["ip"], int(pid)].extend(data["lines"])

    ray_logging.global_worker_stdstream_dispatcher.add_handler("last lines", keep)
