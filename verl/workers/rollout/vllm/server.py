"""vLLM servers of their own: processes of another interpreter, started and ended from here.

    ServerOptions -> VllmServers.start -> N x [process_guard -> python -m vllm...api_server -> its workers]
                                       <- addresses, once every server answers /health

The interpreter may be another environment's: the trainer's needs no vLLM. A server starts with random
weights; the policy's come by transfer (`weight_transfer.py`), through a worker extension on its PYTHONPATH.
Servers end with `close`, and also when the trainer dies, in whatever way (`verl/utils/process_guard.py`).

They run with VLLM_SERVER_DEV_MODE=1: whoever reaches their address can pause them, change their weights and
call methods of their workers. They listen on 127.0.0.1 alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

import verl
from verl.utils import process_guard
from verl.workers.rollout.base import EngineUnavailable
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

logger = logging.getLogger(__name__)

SERVED_MODEL_NAME = "policy"
HOST = "127.0.0.1"
_LOG_LINES = 30
_PORTS = range(20000, 32768)  # below those that the system gives to outgoing connections
# What a launcher or an engine in this process has set for this process alone.
_OWN_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"),
}
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class ServerOptions:
    """What each server is started with.

    Attributes:
        engine_args: vLLM's arguments by the names of its `EngineArgs`. "model" is a must: a Hugging Face
            folder with a configuration and a tokenizer (weights are not read). They win over ours; True and
            False are flags, None leaves an argument out.
        python: interpreter with vLLM.
        devices: CUDA devices of all servers in order, tensor_parallel_size of them each; None: whatever the
            environment shows.
    """

    engine_args: Mapping[str, Any]
    python: str = sys.executable
    devices: Sequence[str] | None = None

    @property
    def devices_per_server(self) -> int:
        return int(self.engine_args.get("tensor_parallel_size") or 1)

    def command(self, port: int) -> list[str]:
        """The command line of a server on this port."""
        ours = {
            "served_model_name": SERVED_MODEL_NAME,
            "load_format": "dummy",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "async_scheduling": False,
            "enable_prefix_caching": True,
            "uvicorn_log_level": "warning",
        }
        arguments = ours | dict(self.engine_args) | {"host": HOST, "port": port}
        module = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        return module + [word for name, value in arguments.items() for word in _flag(name, value)]

    def variables(self, index: int, package_folder: str) -> dict[str, str]:
        """The environment of server `index`."""
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # our sampler takes the place of the first runner's
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environment = ours | {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        if self.devices is not None:
            first, size = index * self.devices_per_server, self.devices_per_server
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[first : first + size])
        paths = [package_folder, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, dict | list):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


class ServerProcess:
    """One running server and its log file."""

    def __init__(self, options: ServerOptions, index: int, folder: Path) -> None:
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self.log_path = folder / f"server-{index}.log"
        command = [sys.executable, process_guard.__file__, str(_GRACE_SECONDS), *options.command(port)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=options.variables(index, str(folder)),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The last lines of what the server wrote."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def kill(self) -> None:
        """SIGKILL to the server and all its processes, at once."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask_to_end(self) -> None:
        """Let the guard end the server; `wait` for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or is asked already
            self._process.stdin.write(b"end")
            self._process.stdin.close()

    def wait(self) -> None:
        """Return when the server's processes are gone; by force if the guard does not manage."""
        try:
            self._process.wait(_GRACE_SECONDS + 5.0)
        except subprocess.TimeoutExpired:
            self.kill()


class VllmServers:
    """N servers that were started together and end together; a context manager."""

    def __init__(self, scratch: tempfile.TemporaryDirectory[str] | None) -> None:
        self.processes: list[ServerProcess] = []
        self._scratch = scratch

    @classmethod
    def start(
        cls,
        options: ServerOptions,
        num_servers: int,
        *,
        log_folder: str | None = None,
        timeout: float = 900.0,
    ) -> VllmServers:
        """Start them side by side and wait until all are healthy.

        `log_folder` keeps the logs (server-0.log ...); without it they go with the servers. EngineUnavailable
        with the log's last lines if one ends, or is not healthy after `timeout` seconds; then none is left.
        """
        if num_servers < 1:
            raise ValueError(f"num_servers is {num_servers}; expected 1 or more")
        needed = num_servers * options.devices_per_server
        if options.devices is not None and len(options.devices) < needed:
            raise ValueError(
                f"{num_servers} servers on {options.devices_per_server} devices each need {needed} devices; "
                f"given: {list(options.devices)}"
            )
        scratch = None if log_folder else tempfile.TemporaryDirectory(prefix="vllm-servers-")
        folder = Path(log_folder or scratch.name)  # type: ignore[union-attr]
        _offer_package(folder)
        servers = cls(scratch)
        try:
            for index in range(num_servers):
                servers.processes.append(ServerProcess(options, index, folder))
            servers._wait_until_healthy(time.monotonic() + timeout, timeout)
        except BaseException:
            servers.close()
            raise
        return servers

    @property
    def urls(self) -> list[str]:
        return [process.url for process in self.processes]

    def close(self) -> None:
        """End all of them. Safe to call twice."""
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.wait()
        self.processes = []
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def __enter__(self) -> VllmServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_healthy(self, deadline: float, timeout: float) -> None:
        waiting = list(self.processes)
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while waiting:
                for process in list(waiting):
                    if not process.alive:
                        raise EngineUnavailable(
                            f"the vLLM server {process.url} ended while it started; the last lines of its "
                            f"log:\n{process.log_tail()}"
                        )
                    if _is_healthy(client, process.url):
                        waiting.remove(process)
                        logger.info("vLLM server %s is ready", process.url)
                if waiting and time.monotonic() > deadline:
                    raise EngineUnavailable(
                        f"the vLLM server {waiting[0].url} was not healthy after {timeout:g} seconds; the "
                        f"last lines of its log:\n{waiting[0].log_tail()}"
                    )
                time.sleep(0.1)


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _offer_package(folder: Path) -> None:
    """Make `folder` a PYTHONPATH entry of this package alone, without the trainer's environment."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "verl"
    if not link.exists():
        link.symlink_to(Path(verl.__file__).parent, target_is_directory=True)


def _free_port() -> int:
    """A port that nobody listens on; the server will take it in a few seconds."""
    for port in random.Random().sample(_PORTS, 100):  # not the program's seed: two runs would collide
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"no free port on {HOST} among {_PORTS.start} to {_PORTS.stop - 1}")
