"""scripts/skypilot: the task as SkyPilot's own code reads it, and its nodes with stand-ins; never a cloud.

SkyPilot stays outside of the project's environment, as it brings some sixty packages. The tests ask the
Python that SKYPILOT_PYTHON names, or this one:

    python -m venv sky && sky/bin/pip install skypilot
    SKYPILOT_PYTHON=sky/bin/python python -m pytest tests/scripts/test_skypilot.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.utils.addresses import open_socket

ROOT = Path(__file__).parents[2]
TASK = ROOT / "scripts" / "skypilot" / "train.yaml"
READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({
    "name": task.name, "nodes": task.num_nodes, "accelerators": resources.accelerators,
    "envs": task.envs, "run": task.run, "setup": task.setup,
}))
"""
# Stand-ins: what they are given goes to a file, and a server answers as it would.
STAND_INS = {
    "retrieval_launch.sh": """
echo "$@" >server
exec python3 -c 'import http.server, json, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{\\"status\\": \\"ready\\"}")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.3", int(sys.argv[1])), Health).serve_forever()' "${@: -1}"
""",
    "scripts/ray_node.sh": 'echo "$@" >"ray-$1"\nexec sleep 60\n',
    "train_grpo.sh": 'echo "$RAY_ADDRESS $@" >training\nexit "${STATUS:-0}"\n',
}


def test_skypilots_own_code_reads_the_task(tmp_path):
    python = os.environ.get("SKYPILOT_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import sky.task"], capture_output=True, cwd=tmp_path).returncode:
        pytest.skip("skypilot is not installed in SKYPILOT_PYTHON, nor here")
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [python, "-c", READ, str(TASK)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    task = json.loads(done.stdout.splitlines()[-1])
    assert (task["name"], task["nodes"], task["accelerators"]) == ("search-r1", 2, {"H100": 8})
    assert task["run"].strip() == "bash scripts/skypilot/node.sh"
    assert task["envs"]["TRAIN_COMMAND"] == "bash train_grpo.sh"


def test_every_variable_of_the_task_is_read():
    task = yaml.safe_load(TASK.read_text())
    read_by = (ROOT / "scripts" / "skypilot" / "node.sh").read_text() + task["setup"]
    assert [name for name in task["envs"] if name not in read_by] == ["WANDB_MODE"]  # wandb's own


@pytest.mark.parametrize("status", [0, 3])
def test_the_last_node_serves_the_others_train_and_all_end_with_the_driver(tmp_path, status):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
    ports = []
    for _ in range(2):
        with open_socket("127.0.0.1", 0) as free:
            ports.append(free.getsockname()[1])
    variables = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n127.0.0.3",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "RETRIEVAL_PORT": str(ports[0]),
        "RUNNING_PORT": str(ports[1]),
        "SILENT_SECONDS": "1",
        "DATA_DIR": "data/mine",
        "OVERRIDES": "max_turns=3",
        "STATUS": str(status),
    }
    nodes = [
        subprocess.Popen(
            ["bash", str(tmp_path / "scripts" / "skypilot" / "node.sh")],
            env=os.environ | variables | {"SKYPILOT_NODE_RANK": str(rank)},
        )
        for rank in range(3)
    ]
    try:
        assert [node.wait(60) for node in nodes] == [status, 0, 0]
    finally:
        for node in nodes:
            node.kill()
    flags = f"--corpus_path data/mine/corpus.jsonl --host 0.0.0.0 --port {ports[0]}\n"
    assert (tmp_path / "server").read_text() == flags
    assert (tmp_path / "ray-head").read_text() == "head --address 127.0.0.1 --port 6379\n"
    assert (tmp_path / "ray-worker").read_text() == "worker --head 127.0.0.1:6379 --address 127.0.0.2\n"
    assert (tmp_path / "training").read_text() == (
        "127.0.0.1:6379 trainer.nnodes=2 trainer.n_gpus_per_node=8 "
        f"retriever.url=http://127.0.0.3:{ports[0]}/retrieve max_turns=3\n"
    )
