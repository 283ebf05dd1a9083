"""Nodes on one machine: apart where nodes are apart, together where a cluster is, and gone at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import namespace_nodes
import psutil
import pytest
from namespace_nodes import NamespaceNodes, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SERVER = """
import socket
listener = socket.create_server(("", 8000))
print("up", flush=True)
while True:
    listener.accept()
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[NamespaceNodes]:
    with NamespaceNodes(["alpha", "beta"], tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


def reaches(node: namespace_nodes.NamespaceNode, address: str, timeout: float) -> bool:
    code = f"import socket; socket.create_connection(('{address}', 8000), timeout={timeout})"
    process = node.start([sys.executable, "-S", "-c", code])
    return process.wait(timeout=30) == 0


def wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_node_has_its_own_name_address_tmp_and_process_ids(nodes, tmp_path):
    for node in nodes:
        assert node.run(["hostname"]) == f"{node.name}\n"
        addresses = json.loads(node.run(["ip", "-json", "-4", "address"]))
        found = {card["ifname"]: card["addr_info"][0]["local"] for card in addresses}
        assert found == {"lo": "127.0.0.1", "eth0": node.address}
        node.run(["sh", "-c", "echo $HOSTNAME >/tmp/mine"])
        assert (node.folder / "tmp" / "mine").exists()
        assert len(node.run(["sh", "-c", "ls -d /proc/[0-9]*"]).split()) < 10
    names = "import socket; print(socket.gethostbyname('alpha'), socket.gethostbyname('beta'))"
    for node in nodes:
        assert node.run([sys.executable, "-S", "-c", names]) == "10.77.0.1 10.77.0.2\n"
    assert not Path("/tmp/mine").exists()
    shared = nodes["alpha"].folder.parent / "for-all"
    nodes["alpha"].run(["touch", shared])
    nodes["beta"].run(["test", "-e", shared])


def test_a_command_has_its_environment_folder_status_and_signals(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("SET_HERE", "1")
    node = nodes["alpha"]
    code = "import os; print(os.environ.get('SET_HERE'), os.environ['MINE'], os.getcwd())"
    folder = str(node.folder)
    found = node.run([sys.executable, "-S", "-c", code], env={"SET_HERE": None, "MINE": "a b"}, cwd=folder)
    assert found == f"None a b {folder}\n"
    with pytest.raises(RuntimeError, match="on alpha ended with 3:\nsorry"):
        node.run(["sh", "-c", "echo sorry >&2; exit 3"])
    process = node.start(["sh", "-c", "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.05; done"])
    wait_until(lambda: process.output() == "up\n")
    process.terminate()
    assert process.wait(timeout=10) == 7 and process.output() == "up\ntold\n"
    process = node.start(["sleep", "100"])
    process.kill()
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_node_that_is_cut_off_is_not_reached_and_comes_back(nodes):
    server = nodes["beta"].start([sys.executable, "-S", "-c", SERVER])
    wait_until(lambda: server.output() == "up\n")
    assert reaches(nodes["alpha"], "beta", 10)
    nodes["beta"].cut_off()
    assert not reaches(nodes["alpha"], "beta", 0.5)
    assert reaches(nodes["beta"], "127.0.0.1", 10)
    nodes["beta"].reconnect()
    assert reaches(nodes["alpha"], "beta", 10)
    server.kill()
    server.wait(timeout=10)


def test_nothing_is_left_when_the_test_is_killed_or_a_node_can_not_be_made(tmp_path):
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from namespace_nodes import NamespaceNodes
with NamespaceNodes(2, Path({str(tmp_path)!r})) as nodes:
    nodes[1].start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    print(*(node.pid for node in nodes), flush=True)
    time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    holders = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    inside = {os.readlink(f"/proc/{holder.pid}/ns/pid") for holder in holders}
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs(holders, timeout=20)

    def remaining() -> set[str]:
        found = set()
        for process in psutil.process_iter():
            try:
                found.add(os.readlink(f"/proc/{process.pid}/ns/pid"))
            except OSError:
                continue
        return found & inside

    wait_until(lambda: not remaining())
    before = psutil.Process().children()
    with pytest.raises(RuntimeError), NamespaceNodes(["fine", "n" * 100], tmp_path):
        pass
    assert psutil.Process().children() == before
