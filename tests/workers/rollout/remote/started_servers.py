"""vLLM servers as their owners start them (docs/rollout.md), ended with the test."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

ROOT = Path(__file__).resolve().parents[4]
PORTS = range(20000, 32768)  # below those that the system gives to outgoing connections
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
ARGUMENTS = {
    "served_model_name": "policy",
    "load_format": "dummy",
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": WORKER_EXTENSION,
    "no_async_scheduling": True,
    "enable_scale_out": True,
    "uvicorn_log_level": "warning",
}


def free_port():
    for port in random.Random().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def command_of(arguments, port):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    for name, value in (ARGUMENTS | arguments | {"port": port}).items():
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


class StartedServers:
    """So many servers with the same arguments; all are healthy when this is made."""

    def __init__(self, arguments, count, folder, timeout=400.0):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self.urls = []
        self.processes = []
        self.logs = []
        for index in range(count):
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            self.logs.append(Path(folder) / f"server-{index}.log")
            with self.logs[-1].open("wb") as log:
                process = subprocess.Popen(
                    command_of(arguments, port),
                    stdout=log,
                    stderr=log,
                    env=environment | ENVIRONMENT,
                    start_new_session=True,
                )
            self.processes.append(process)
        try:
            self._wait_until_healthy(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def _wait_until_healthy(self, deadline):
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            for url, process, log in zip(self.urls, self.processes, self.logs, strict=True):
                while True:
                    with suppress(httpx.TransportError):
                        if client.get(f"{url}/health").status_code == 200:
                            break
                    ended = process.poll() is not None or time.monotonic() > deadline
                    assert not ended, log.read_text(errors="replace")[-3000:]
                    time.sleep(0.2)

    def kill(self, url):
        """SIGKILL to a server and all its processes."""
        process = self.processes[self.urls.index(url)]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for url in self.urls:
            self.kill(url)
