"""Ports of Ray's agents that are chosen before a node starts.

    with fixed_agent_ports():           a cluster of this machine alone
        ray.init(...)
    python -m verl.single_controller.ray.agent_ports start ...     `ray start ...` of a node of a cluster

The raylet of a node starts two agents, which are Python programs. If they choose their own ports, it waits
15 seconds for them to say which, and then crashes, however busy the machine is
(github.com/ray-project/ray/issues/65983). It does not wait for a port that it knows. Ray does not tell it one
of the ports, which is therefore written where the agent would write it.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ray import _raylet
from ray._private import services

_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


@contextmanager
def fixed_agent_ports() -> Iterator[None]:
    """Give free ports to the agents of each node that Ray starts within the block, where none are given."""
    start_raylet = services.start_raylet
    signature = inspect.signature(start_raylet)

    def start_raylet_with_ports(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        for name, port in _free_ports().items():
            if not call.arguments.get(name):
                call.arguments[name] = port
        persist_port = getattr(_raylet, "persist_port", None)
        if persist_port is not None:  # Ray's older versions do not wait for it
            name = "dashboard_agent_listen_port"
            folder = call.arguments["session_dir"]
            persist_port(folder, call.arguments["node_id"], name, call.arguments[name])
        return start_raylet(*call.args, **call.kwargs)

    services.start_raylet = start_raylet_with_ports
    try:
        yield
    finally:
        services.start_raylet = start_raylet


def _free_ports() -> dict[str, int]:
    """Return a port for each agent that was free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in _PORTS}
        for listener in sockets.values():
            listener.bind(("", 0))
        return {name: listener.getsockname()[1] for name, listener in sockets.items()}


def main() -> None:
    """Run Ray's command line with this process's arguments."""
    from ray.scripts import scripts

    with fixed_agent_ports():
        scripts.main()


if __name__ == "__main__":
    main()
