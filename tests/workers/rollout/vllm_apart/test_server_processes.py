"""Server processes: started, waited for, quoted when they fail, and never left behind."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from verl.workers.rollout.vllm.server import VllmServers

MODEL = {"model": "/no/such/model"}

# In the place of an interpreter with vLLM: writes down what it was started with, then answers /health.
STUB = f"""#!{sys.executable}
import http.server, json, os, subprocess, sys
arguments = dict(zip(sys.argv[1:], [*sys.argv[2:], None]))
child = subprocess.Popen(["sleep", "600"])
said = {{"argv": sys.argv[1:], "pids": [os.getpid(), child.pid], "environ": dict(os.environ)}}
print(json.dumps(said), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS)
        self.end_headers()
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


def interpreter(folder, source):
    path = folder / "python"
    path.write_text(source)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, timeout=10.0):
    deadline = time.monotonic() + timeout
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def said(log_path):
    return json.loads(Path(log_path).read_text().splitlines()[0])


def test_servers_start_side_by_side_with_the_right_words_and_end_with_their_children(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    engine_args = {**MODEL, "max_num_seqs": 4, "enforce_eager": True, "hf_overrides": {"a": 1}, "seed": None}
    stub = interpreter(tmp_path, STUB.replace("STATUS", "200"))
    with closing(VllmServers(engine_args, 2, stub, devices=["4", "5"], timeout=20.0)) as servers:
        words = [said(process.log_path) for process in servers.processes]
        assert len(set(servers.urls)) == 2 and all(
            url.startswith("http://127.0.0.1:") for url in servers.urls
        )
        for index, (found, url) in enumerate(zip(words, servers.urls, strict=True)):
            argv = " ".join(found["argv"])
            environment = found["environ"]
            assert argv.startswith("-m vllm.entrypoints.openai.api_server ")
            for part in (
                "--model /no/such/model",
                "--max-num-seqs 4",
                "--enforce-eager",
                '--hf-overrides {"a": 1}',
                "--load-format dummy",
                "--no-async-scheduling",
                f"--port {url.rsplit(':', 1)[1]}",
            ):
                assert part in argv
            assert "--seed" not in argv
            assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["OMP_NUM_THREADS"] == "3"
            assert environment["CUDA_VISIBLE_DEVICES"] == str(4 + index)
            assert "WORLD_SIZE" not in environment
            package = environment["PYTHONPATH"].split(os.pathsep)[0]
            assert sorted(p.name for p in Path(package).iterdir() if not p.name.endswith(".log")) == ["verl"]
    wait_until_gone([pid for found in words for pid in found["pids"]])
    servers.close()


def test_a_server_that_ends_while_it_starts_is_an_error_with_its_last_words(tmp_path):
    broken = interpreter(tmp_path, "#!/bin/sh\necho no such model; exit 3\n")
    with pytest.raises(RuntimeError, match=r"(?s)ended while it started.*no such model.*exit code 3"):
        VllmServers(MODEL, 1, broken, timeout=20.0)


TRAINER = """
import sys, time
from verl.workers.rollout.vllm.server import VllmServers
servers = VllmServers({"model": "x"}, 1, sys.argv[1], timeout=20.0)
print(servers.processes[0].log_path, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_when_the_process_that_started_them_is_killed(tmp_path, how):
    stub = interpreter(tmp_path, STUB.replace("STATUS", "200"))
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, stub], stdout=subprocess.PIPE, text=True
    ) as trainer:
        pids = said(trainer.stdout.readline().strip())["pids"]
        trainer.send_signal(how)
        trainer.wait()
        wait_until_gone(pids)


@pytest.fixture
def three_gpus():
    """Ray, which is told of three GPUs."""
    import ray

    from verl.single_controller.ray.session import choose_temp_dir

    options = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": choose_temp_dir()[0]}
    ray.init(address="local", num_cpus=1, num_gpus=3, **options)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_with_ray_servers_go_to_gpus_that_nobody_has_and_end_with_their_starter(
    three_gpus, tmp_path, monkeypatch
):
    import ray

    from verl.workers.rollout.vllm import ray_servers

    @ray.remote(num_cpus=0, num_gpus=1)
    class Trains:
        def gpus(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    trainer = Trains.remote()
    taken = ray.get(trainer.gpus.remote())
    logs = tmp_path / "logs"
    logs.mkdir()
    told = f"open({str(logs)!r} + '/' + arguments['--port'], 'w').write(json.dumps(said))"
    stub = interpreter(tmp_path, STUB.replace("STATUS", "200").replace("print(json", f"{told}\nprint(json"))
    with closing(ray_servers.RayServers(MODEL, 2, stub)) as servers:
        address = ray.util.get_node_ip_address()
        assert len(set(servers.urls)) == 2 and all(address in url for url in servers.urls)
        words = [json.loads((logs / url.rsplit(":", 1)[1]).read_text()) for url in servers.urls]
        devices = [found["environ"]["CUDA_VISIBLE_DEVICES"] for found in words]
        assert {taken, *devices} == {"0", "1", "2"}
        assert all(f"--host {address}" in " ".join(found["argv"]) for found in words)
        monkeypatch.setattr(ray_servers, "_SECONDS_TO_RESERVE", 1.0)
        with pytest.raises(ValueError, match="no room for 1 servers with 1 GPUs .*free in all: 0 GPUs"):
            ray_servers.RayServers(MODEL, 1, stub)
    wait_until_gone([pid for found in words for pid in found["pids"]])
