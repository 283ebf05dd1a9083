"""How srun, scontrol and scancel speak with the job's controller (controller.py)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any


def ask(
    request: dict[str, Any], when_sent: Callable[[Callable[[dict], None]], None] | None = None
) -> dict[str, Any]:
    """Send a request with our stdout and stderr, and wait for the answer.

    Args:
        request: what is wanted.
        when_sent: called with a function that sends more while the answer is awaited.
    """
    with socket.socket(socket.AF_UNIX) as connection:

        def send(message: dict[str, Any]) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        connection.connect(os.environ["SLURM_STANDIN_SOCKET"])
        socket.send_fds(connection, [b"!"], [1, 2])
        send(request)
        if when_sent is not None:
            when_sent(send)
        line = connection.makefile().readline()
    return json.loads(line) if line else {"error": "the job's controller is gone"}
