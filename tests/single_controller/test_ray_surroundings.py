"""What stands around a Ray run: addresses, variables for workers, its folder."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

pytest.importorskip("ray")

from verl.single_controller.ray import environment, session

# ---------------------------------------------------------------- address


@contextlib.contextmanager
def listener(answer: bytes | None):
    """A server that answers one connection with some bytes, or (None) with silence; gives host:port."""
    with socket.socket() as server, contextlib.ExitStack() as connections:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection = connections.enter_context(server.accept()[0])
            connection.recv(100)
            if answer is not None:
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("head", "expected host:port"),
        ("head:port", "expected host:port"),
        ("ray://head:10001", "Ray Client.*ray job submit"),
        ("no-such-host.invalid:6379", "no Ray head node answers there"),
    ],
)
def test_an_address_that_no_cluster_can_have_is_refused_with_advice(address, says):
    with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}.*{says}"):
        session.check_address(address)


def test_a_stale_address_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(
        ValueError, match="no Ray head node answers there .*ray_node.sh head.*unset RAY_ADDRESS"
    ):
        session.init_ray()


def test_another_server_at_the_address_is_not_taken_for_ray(monkeypatch):
    monkeypatch.setattr(session, "_SECONDS_TO_ANSWER", 0.2)
    no_head = pytest.raises(ValueError, match="what answers there is no Ray head node")
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, no_head:
        session.check_address(address)
    silence = pytest.raises(ValueError, match="no Ray head node answers there .*timed out")
    with listener(None) as address, silence:
        session.check_address(address)
    with listener(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address:
        session.check_address(address)


# -------------------------------------------------------------- variables


def test_workers_get_the_listed_variables_and_no_secret_in_a_runtime_environment(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    carried = {
        "VERL_LOGGING_LEVEL": "debug",
        "HF_HOME": "/models",
        "NO_PROXY": "a,b",
        "no_proxy": "a,b",
        "NCCL_IB_HCA": "mlx5",
        "LD_PRELOAD": "/opt/nccl/libnccl.so.2",
        "HF_HUB_OFFLINE": "1",
    }
    secret = {"HF_TOKEN": "hf_x", "https_proxy": "http://me:word@proxy:3128", "HTTP_PROXY": "http://proxy"}
    other = {"WANDB_API_KEY": "w", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/root", "RAY_ADDRESS": "a:1"}
    for name, value in (carried | secret | other).items():
        monkeypatch.setenv(name, value)
    assert environment.carried_variables() == carried
    assert environment.secret_variables() == secret


# ----------------------------------------------------------------- folder

MOUNTS = [
    "/dev/root / ext4 rw 0 0",
    "server:/home /home nfs4 rw 0 0",
    "auto.scratch /scratch autofs rw 0 0",
    "fs0 /scratch/big\\040disk lustre rw 0 0",
]


def test_a_network_file_system_is_refused_when_asked_for_and_left_when_it_is_the_default(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/home/me/tmp")
    with pytest.raises(ValueError, match=r"RAY_TMPDIR=/home/me/tmp is on a network file system \(nfs4\)"):
        session.choose_temp_dir(MOUNTS)
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", "/home/me/tmp")
    folder, note = session.choose_temp_dir(MOUNTS)
    assert folder == "/tmp/ray" and note is not None
    assert note.startswith("Ray works in /tmp/ray: /home/me/tmp is on a network file system (nfs4)")
    with pytest.raises(ValueError, match="can't be used either. Set RAY_TMPDIR"):
        session.choose_temp_dir(["server:/ / nfs rw 0 0"])


def test_a_path_is_on_what_was_mounted_last_and_deepest():
    for folder, kind in (("/scratch/big disk/me", "lustre"), ("/data/me", "nfs4")):
        mounts = [*MOUNTS, "auto.data /data autofs rw 0 0", "server:/data /data nfs4 rw 0 0"]
        assert f"network file system ({kind})" in str(session.why_unusable(folder, mounts))
