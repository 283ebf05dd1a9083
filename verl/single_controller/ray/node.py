"""One node of a Ray cluster, in the foreground: `bash scripts/ray_node.sh head|worker`.

    head:    ray start --head --block      once; ends with the cluster
    worker:  ray start --block             again and again: wait for the head, join, work, and when the node
                                           was cut off or its Ray processes died, join anew
    SIGTERM, SIGINT -> the Ray processes of this node end, then this one

A node that was cut off for longer than the health check allows is dead for the cluster. Its Ray processes,
and the workers on them, end as soon as they hear of it. Only a new start brings the node back, with nothing
left on it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from verl.single_controller.ray.environment import RAY_SETTINGS
from verl.single_controller.ray.session import check_address, choose_temp_dir, cores_for_ray
from verl.utils.text import printable

# The head asks each node every second and takes one for lost after 5 failed answers. A process that is gone
# refuses at once; one that gets no CPU time, while eight others load a model there, has 10 seconds for each.
# (Ray's own: every 3 s, the same limits.)
HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
# A node that is told to end does not wait for the work on it: the driver restarts it elsewhere, or is gone.
_NODE_SETTINGS = RAY_SETTINGS | HEALTH_CHECK | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "3"}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SECONDS_BETWEEN_TRIES = 2.0
_SECONDS_TO_END = 20.0


class Stopped(Exception):
    """An error that says by which signal this node was asked to end."""


def _stop(number: int, frame: FrameType | None) -> None:
    for signal_number in _SIGNALS:  # once is enough: what ends the node's processes must not be interrupted
        signal.signal(signal_number, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def ray_command(options: argparse.Namespace, ray_arguments: list[str]) -> list[str]:
    """Return the `ray start` of this node.

    `ray_arguments` are the user's arguments, which come last and win.
    """
    temp_dir, note = choose_temp_dir()
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    command = [sys.executable, "-m", "verl.single_controller.ray.agent_ports", "start", "--block"]
    command += ["--disable-usage-stats", f"--temp-dir={temp_dir}"]
    if options.address is not None:
        command.append(f"--node-ip-address={options.address}")
    if options.kind == "head":
        command += ["--head", f"--port={options.port}", "--include-dashboard=false"]
    else:
        command.append(f"--address={options.head}")
    if not any(argument.split("=")[0] == "--num-cpus" for argument in ray_arguments):
        command.append(f"--num-cpus={cores_for_ray()}")
    return command + ray_arguments


def run_node(command: list[str]) -> int:
    """Run the node's Ray processes until they end, and return their exit status.

    When a signal comes, the processes are ended.
    """
    node = subprocess.Popen(command, start_new_session=True)  # signals come to us, and we end it
    try:
        return node.wait()
    finally:
        if node.poll() is None:
            node.terminate()
            try:
                node.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def wait_for_head(head: str) -> None:
    """Wait until a head node answers there.

    Raises ValueError only for an address that can't be one of a head node.
    """
    is_announced = False
    while True:
        try:
            return check_address(head)
        except ValueError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if not is_announced:
                print(f"waiting for the head node at {head}: {error.__cause__}", flush=True)
                is_announced = True
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="ray_node.sh",
        description="A node of a Ray cluster, in the foreground. What is not known here goes to `ray start` "
        "(--num-cpus=8, --num-gpus=4, --include-dashboard=true for `ray job submit`, ...).",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=["head", "worker"])
    parser.add_argument("--address", help="this node's address, if it has several network cards")
    parser.add_argument("--port", type=int, help="head: where it listens; default: 6379")
    parser.add_argument("--head", help="worker: host:port of the head node; default: RAY_ADDRESS")
    options, ray_arguments = parser.parse_known_args(argv)
    if (options.head if options.kind == "head" else options.port) is not None:
        parser.error("--port is for a head, where it listens; --head is for a worker, which joins it there")
    address = options.address or ""
    if address in ("localhost", "::1") or address.startswith("127.") or address.count(":") == 1:
        parser.error(
            f"--address {address}: expected the address of this node's network card that the other nodes "
            "reach, without a port; leave it out if there is one card"
        )
    options.port = options.port or 6379
    options.head = options.head or os.environ.get("RAY_ADDRESS")
    if options.kind == "worker" and not options.head:
        parser.error("a worker needs --head host:port, or RAY_ADDRESS")
    return options, ray_arguments


def main(argv: list[str]) -> int:
    options, ray_arguments = _arguments(argv)
    for name, value in _NODE_SETTINGS.items():
        os.environ.setdefault(name, value)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    try:
        command = ray_command(options, ray_arguments)
        if options.kind == "head":
            os.environ.pop("RAY_ADDRESS", None)  # `ray start --head` refuses to start with it
            return run_node(command)
        while True:
            wait_for_head(options.head)
            status = run_node(command)
            print(f"this node's Ray processes ended (status {status}); joining again", flush=True)
            time.sleep(_SECONDS_BETWEEN_TRIES)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except Stopped as error:
        print(f"stopped by {error}", flush=True)
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
