"""Data parallelism of servers: a server of its own for each copy of the model, on neighbouring ports.

    --data_parallel_size 3 --port 8001 -> processes at 8001, 8002, 8003, each with GPUs of its own

Each copy is a server like any other: an episode stays at one of them, and clients share out their work, as
training does with `rollout.remote.urls=[...]`. The first server that ends ends the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Replica(NamedTuple):
    """The command of a server, and what its environment has beside this one's."""

    command: list[str]
    environment: dict[str, str]


def replicas_of(
    arguments: Sequence[str], port: int, num_replicas: int, gpus_of_each: int, gpus: Sequence[str]
) -> list[Replica]:
    """Return the servers of a model's copies.

    Args:
        arguments: The arguments of `python -m verl.inference`, of which later ones win.
        port: The port of the first server.
        num_replicas: The number of copies.
        gpus_of_each: The number of GPUs that share a copy.
        gpus: The names of the GPUs, as in CUDA_VISIBLE_DEVICES. Empty on a machine without any.

    Raises:
        ValueError: If there are too few GPUs or ports.
    """
    needed = num_replicas * gpus_of_each
    if gpus and len(gpus) < needed:
        raise ValueError(
            f"--data_parallel_size {num_replicas}: found {len(gpus)} GPUs ({VISIBLE}={','.join(gpus)}); "
            f"expected {needed}, {gpus_of_each} for each copy of the model"
        )
    if not 1 <= port <= 65536 - num_replicas:
        raise ValueError(
            f"--data_parallel_size {num_replicas}: found --port {port}; expected a number from which "
            f"{num_replicas} ports follow each other"
        )
    replicas = []
    for number in range(num_replicas):
        command = [sys.executable, "-m", "verl.inference", *arguments]
        command += ["--data_parallel_size", "1", "--port", str(port + number)]
        of_replica = gpus[number * gpus_of_each : (number + 1) * gpus_of_each]
        replicas.append(Replica(command, {VISIBLE: ",".join(of_replica)} if gpus else {}))
    return replicas


def visible_gpu_names() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def run_replicas(replicas: Sequence[Replica]) -> int:
    """Run servers until one of them ends or a signal comes, and end the others.

    Returns:
        The exit status of the server that ended first, or 0 after SIGTERM or SIGINT.
    """
    # The objects are kept: subprocess itself waits for the processes of those that are not.
    running: dict[int, subprocess.Popen[bytes]] = {}
    is_stopping = False

    def stop(*_: int | FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    status = 0
    try:
        for command, environment in replicas:
            if is_stopping:
                break
            process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
            running[process.pid] = process
        if is_stopping:  # the signal may have come before the last process was noted
            stop()
        while running:
            pid, state = os.waitpid(-1, 0)
            if pid not in running:
                continue
            process = running.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(state)
            if not is_stopping:
                status = process.returncode
                print(f"a server has ended with status {status}; the others end, too", file=sys.stderr)
                stop()
    finally:
        stop()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status
