"""vLLM servers of their own: processes of another interpreter, started and ended from here.

    VllmServers(arguments) -> N x [process_guard -> python -m vllm...api_server -> its workers]
                           <- addresses, once every server answers /health

The interpreter may be another environment's: the trainer's needs no vLLM. A server starts with random
weights; the policy's come by transfer (`weight_transfer.py`), through a worker extension on its PYTHONPATH.
Servers end with `close`, and also when the trainer dies, in whatever way (`verl/utils/process_guard.py`).

They run with VLLM_SERVER_DEV_MODE=1: whoever reaches their address can pause them, change their weights and
call methods of their workers. They listen on 127.0.0.1 alone, but where Ray has placed them
(ray_servers.py): there on the node's address in the cluster.
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
from pathlib import Path
from typing import Any

import httpx

import verl
from verl.sessions.engine_contract import EngineUnavailable
from verl.utils import process_guard
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


class ServerProcess:
    """One running server and its log file."""

    def __init__(
        self, url: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self.url = url
        self.log_path = log_path
        guard = [sys.executable, process_guard.__file__, str(_GRACE_SECONDS)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        """Return the last lines that the server wrote."""
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
    """N servers that were started together and end together."""

    def __init__(
        self,
        engine_args: Mapping[str, Any],
        num_servers: int,
        python: str = sys.executable,
        devices: Sequence[str] | None = None,
        timeout: float = 900.0,
        host: str = HOST,
    ) -> None:
        """Start them side by side and wait until all are healthy.

        engine_args: vLLM's arguments by the names of its `EngineArgs`. "model" is a must: a Hugging Face
        folder with a configuration and a tokenizer (weights are not read). They win over ours; True and False
        are flags, None leaves an argument out. python: interpreter with vLLM. devices: CUDA devices of all
        servers in order, tensor_parallel_size of them each; None: whatever the environment shows. host: this
        machine's address to listen on.

        Raises ValueError for too few devices, EngineUnavailable with the log's last lines, if one ends, or is
        not healthy after `timeout` seconds; then none is left.
        """
        size = int(engine_args.get("tensor_parallel_size") or 1)
        if devices is not None and len(devices) < num_servers * size:
            raise ValueError(
                f"{num_servers} servers on {size} devices each need {num_servers * size} devices; given: "
                f"{list(devices)}"
            )
        self.processes: list[ServerProcess] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-servers-")
        folder = Path(self._scratch.name)
        # a PYTHONPATH entry of this package alone, without the trainer's environment
        (folder / "verl").symlink_to(Path(verl.__file__).parent, target_is_directory=True)
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # our sampler takes the place of the first runner's
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        } | {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
        try:
            for index in range(num_servers):
                port = _free_port(host)
                if devices is not None:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * size : (index + 1) * size])
                url = f"http://{host}:{port}"
                log_path = folder / f"server-{index}.log"
                command = _command(engine_args, python, host, port)
                self.processes.append(ServerProcess(url, command, environment, log_path))
            self._wait_until_healthy(timeout)
        except BaseException:
            self.close()
            raise

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
        self._scratch.cleanup()

    def _wait_until_healthy(self, timeout: float) -> None:
        waiting = list(self.processes)
        deadline = time.monotonic() + timeout
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while waiting:
                process = waiting.pop(0)
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{process.url}/health").status_code == 200:
                        logger.info("vLLM server %s is ready", process.url)
                        continue
                problem = f"was not healthy after {timeout:g} seconds" if time.monotonic() > deadline else ""
                if not process.alive:
                    problem = "ended while it started"
                if problem:
                    told = f"{problem}; the last lines of its log:\n{process.log_tail()}"
                    raise EngineUnavailable(f"the vLLM server {process.url} {told}")
                waiting.append(process)
                time.sleep(0.1)


def _command(engine_args: Mapping[str, Any], python: str, host: str, port: int) -> list[str]:
    """Return the command line of a server on this port."""
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
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in (ours | dict(engine_args) | {"host": host, "port": port}).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            command += [f"--{flag}", text]
    return command


def _free_port(host: str) -> int:
    """Return a port that nobody listens on. The server will take it in a few seconds."""
    for port in random.Random().sample(_PORTS, 100):  # not the program's seed: two runs would collide
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no free port on {host} among {_PORTS.start} to {_PORTS.stop - 1}")
