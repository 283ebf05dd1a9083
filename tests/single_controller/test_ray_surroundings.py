"""What stands around a Ray run: addresses, variables for workers, its folder, room in the cluster, deaths."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

pytest.importorskip("ray")

from ray.exceptions import OutOfMemoryError, RayActorError

from verl.single_controller.ray import deaths, environment, node, session, temp_dir
from verl.single_controller.ray.resource_pool import RayResourcePool
from verl.single_controller.ray.room import missing_room, needs_of

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


@pytest.mark.slow
def test_rays_settings_are_made_before_ray_reads_them():
    program = (
        "import verl.single_controller.ray\n"
        "from ray._private.ray_constants import RAY_ENABLE_UV_RUN_RUNTIME_ENV as hook\n"
        "raise SystemExit(hook)"
    )
    variables = {name: value for name, value in os.environ.items() if name not in environment.RAY_SETTINGS}
    assert subprocess.run([sys.executable, "-c", program], env=variables, check=False).returncode == 0


def test_workers_get_the_listed_variables_and_no_secret_in_a_runtime_environment(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    carried = {
        "HF_HOME": "/models",
        "NO_PROXY": "a,b",
        "no_proxy": "a,b",
        "NCCL_IB_HCA": "mlx5",
        "HF_HUB_OFFLINE": "1",
    }
    secret = {"HF_TOKEN": "hf_x", "https_proxy": "http://me:word@proxy:3128", "HTTP_PROXY": "http://proxy"}
    other = {"WANDB_API_KEY": "w", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/root", "RAY_ADDRESS": "a:1"}
    for name, value in (carried | secret | other).items():
        monkeypatch.setenv(name, value)
    assert environment.carried_variables() == carried
    assert environment.secret_variables() == secret


def test_collectives_meet_on_the_card_of_the_nodes_address_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert environment.card_of_address("127.0.0.1") == "lo"
    assert environment.card_of_address("203.0.113.77") is None
    assert environment.collective_variables("127.0.0.1") == {}, "the loopback reaches no other node"
    monkeypatch.setattr(environment, "card_of_address", lambda address: "eth7")
    assert environment.collective_variables("10.1.2.3") == {"GLOO_SOCKET_IFNAME": "eth7"}


# ----------------------------------------------------------------- folder

MOUNTS = [
    "/dev/root / ext4 rw 0 0",
    "server:/home /home nfs4 rw 0 0",
    "auto.scratch /scratch autofs rw 0 0",
    "fs0 /scratch/big\\040disk lustre rw 0 0",
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/home/me", "nfs4"), ("/homestead", "ext4"), ("/scratch/big disk/x", "lustre")],
)
def test_the_file_system_of_a_path_is_that_of_the_closest_mount(path, kind):
    assert temp_dir.file_system_of(path, MOUNTS) == kind


def test_a_network_file_system_is_refused_when_asked_for_and_left_when_it_is_the_default(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/home/me/tmp")
    with pytest.raises(ValueError, match=r"RAY_TMPDIR=/home/me/tmp is on a network file system \(nfs4\)"):
        temp_dir.choose_temp_dir(MOUNTS)
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", "/home/me/tmp")
    folder, note = temp_dir.choose_temp_dir(MOUNTS)
    assert folder == "/tmp/ray" and note is not None
    assert note.startswith("Ray works in /tmp/ray: /home/me/tmp is on a network file system (nfs4)")
    with pytest.raises(ValueError, match="can't be used either. Set RAY_TMPDIR"):
        temp_dir.choose_temp_dir(["server:/ / nfs rw 0 0"])


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_not_taken(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * temp_dir.LONGEST_FOLDER)
    folder.mkdir()
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    with pytest.raises(ValueError, match="more than 36 bytes, and a socket's path below it"):
        temp_dir.choose_temp_dir()
    longest = f"/{'x' * (temp_dir.LONGEST_FOLDER - 1)}/ray/session_2026-11-22_05-41-23_557441_4194304"
    assert len(f"{longest}/sockets/plasma_store.99") == 107


# ------------------------------------------------------------------- room


def test_room_is_counted_by_node():
    two = [{"CPU": 0.5, "GPU": 0.0}] * 2
    node_of = {"CPU": 1.0}
    assert missing_room([two], [node_of, node_of]) is None
    assert missing_room([two], [{"CPU": 64.0}]) == (
        "1 node with 0.5 CPUs free (nodes that are there: 64 CPUs)"
    ), "the processes of a pool's second node go to a second node"
    assert missing_room([two, two], [node_of, node_of]) is None, "pools share nodes"
    assert missing_room([two, two, two], [node_of, node_of]) == (
        "2 nodes with 0.5 CPUs free (nodes that are there: 1 CPUs; 1 CPUs)"
    )
    assert missing_room([[{"CPU": 2.0, "GPU": 8.0}]], []) == (
        "1 node with 2 CPUs and 8 GPUs free (nodes that are there: none)"
    )
    with_gpus = [{"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0}]
    assert missing_room([[{"CPU": 1.0, "GPU": 0.0}], [{"CPU": 1.0, "GPU": 8.0}]], with_gpus) is None
    assert needs_of(RayResourcePool([8, 8], use_gpu=True)) == [{"CPU": 2.0, "GPU": 8.0}] * 2


# ----------------------------------------------------------------- deaths


@pytest.mark.parametrize(
    ("error", "lines", "oom_kills", "cause"),
    [
        (RayActorError(), ["Fatal Python error: Segmentation fault"], 0, "killed by SIGSEGV"),
        (RayActorError(), ["*** SIGABRT received at time=1 on cpu 0 ***"], 0, "killed by SIGABRT"),
        (RayActorError(), ["Fatal Python error: none_dealloc"], 0, "fatal error: none_dealloc"),
        (
            RayActorError(),
            ["all is well"],
            1,
            "killed by the kernel's OOM killer (SIGKILL): the node's memory was used up",
        ),
        (RayActorError(), [], 0, "it ended without a word: SIGKILL from outside (kill -9), or os._exit"),
        (
            RayActorError(error_msg="Worker exits with an exit code 4."),
            [],
            0,
            "it ended itself with exit code 4",
        ),
        (RayActorError(error_msg="exit code 1. The process receives a SIGTERM."), [], 0, "killed by SIGTERM"),
        (OutOfMemoryError("x"), [], 0, "killed by Ray, as the node was running out of memory"),
    ],
)
def test_the_cause_of_a_death_is_read_from_what_is_left(error, lines, oom_kills, cause):
    assert deaths.cause_of_death(error, lines, oom_kills).startswith(cause)


def test_the_last_words_are_the_ends_of_the_logs_without_rays_marks(tmp_path):
    output, errors = tmp_path / "out", tmp_path / "err"
    output.write_text(":job_id:01\n:actor_name:X\nhello\n\n")
    errors.write_text("".join(f"line {i}\n" for i in range(100)))
    lines = deaths.read_remains((str(output), str(errors), str(tmp_path / "none"))).lines
    assert lines[0] == "hello" and lines[1] == "line 80" and lines[-1] == "line 99"


# ------------------------------------------------------------------- node


def test_a_node_is_started_in_the_foreground_with_what_the_user_added_last(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options, more = node._arguments(["worker", "--head", "10.0.0.1:6379", "--num-cpus=4"])
    command = node.ray_command(options, more)
    assert command[3:5] == ["start", "--block"] and command[-2:] == [
        "--address=10.0.0.1:6379",
        "--num-cpus=4",
    ]
    options, more = node._arguments(["head", "--address", "10.0.0.1", "--include-dashboard=true"])
    command = node.ray_command(options, more)
    assert {"--head", "--port=6379", "--node-ip-address=10.0.0.1", "--temp-dir=/tmp/ray"} < set(command)
    assert command[-2:] == ["--include-dashboard=false", "--include-dashboard=true"]
    with pytest.raises(SystemExit):
        node._arguments(["worker"])
