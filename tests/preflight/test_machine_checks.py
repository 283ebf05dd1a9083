"""Checks of a machine: its troubles are provoked for real, those of GPUs come from recorded output."""

import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from preflight_cases import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    TWO_ON_RAY,
    can_unshare,
    find,
    in_child,
    sh,
    target_of,
)

from verl.planning.hardware import memory_of_machine
from verl.preflight import machine_checks
from verl.preflight.target import Cluster, RayNode, exclude_line
from verl.utils.device import loaded_nccl

needs_namespaces = pytest.mark.skipif(can_unshare() is not None, reason=str(can_unshare()))


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({"memory.max": "max", "a/memory.max": "2000", "a/b/memory.max": "3000"}, "0::/a/b", 2000),
        ({"memory/job/memory.limit_in_bytes": "70000"}, "4:memory:/job", 70000),
        ({"memory/memory.limit_in_bytes": "6000"}, "4:memory:/docker/not/here", 6000),
    ],
)  # fmt: skip
def test_memory_limits_of_both_versions_and_of_all_control_groups_above_count(tmp_path, files, own, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert memory_of_machine(tmp_path, tmp_path / "own") == expected


def test_an_affinity_to_one_core_counts_against_what_ray_counts():
    def pin() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    cluster = Cluster("10.0.0.1:6379", nodes=(RayNode("node1", "127.0.0.1", 64, 0, True),))
    (line,) = in_child(lambda: find("cpus", target_of(*TWO_ON_RAY, cluster=cluster)), pin)
    assert "Ray counts 64 cores, this job may use 1" in line and "--num-cpus=1" in line
    assert in_child(lambda: find("cpus", target_of()), pin) == []  # without Ray nobody counts


def test_few_open_files():
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 3000))

    (line,) = in_child(lambda: find("open-files", target_of()), limit)
    assert "ulimit -n 256" in line
    (line,) = in_child(lambda: find("open-files", target_of(*TWO_ON_RAY)), limit)
    assert "4096 may be needed" in line and "the administrator" in line
    remote = target_of("actor_rollout_ref.rollout.name=remote")
    assert "2304 may be needed" in in_child(lambda: find("open-files", remote), limit)[0]


def mount(folder: Path, options: str) -> None:
    sh("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


@needs_namespaces
def test_a_read_only_run_folder(tmp_path):
    folder = tmp_path / "runs" / "new" / "deep"
    target = target_of(f"trainer.default_local_dir={folder}")
    assert find("writable", target) == []
    (line,) = in_child(
        lambda: find("writable", target), lambda: mount(tmp_path, "ro,size=1m"), namespaces=CLONE_NEWNS
    )
    assert f"{folder} can't be written (Read-only file system)" in line
    assert not (tmp_path / "runs").exists()


@needs_namespaces
def test_a_full_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def fill() -> None:
        mount(tmp_path, "size=200k")
        with open(tmp_path / "fill", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    (line,) = in_child(lambda: find("home", target_of()), fill, namespaces=CLONE_NEWNS)
    assert "can't be written (No space left on device)" in line and "export HF_HOME=" in line


@needs_namespaces
def test_a_disk_too_small_for_the_checkpoints(tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}"
    often = (folder, "trainer.save_freq=10", "trainer.total_training_steps=100")

    def lines(*settings: str) -> list[str]:
        return in_child(
            lambda: find("checkpoints", target_of(*settings)),
            lambda: mount(tmp_path, "size=40m"),
            namespaces=CLONE_NEWNS,
        )

    (line,) = lines(*often)
    assert "4 checkpoints of about " in line and "Do: trainer.max_ckpt_to_keep=1" in line
    assert lines(*often, "trainer.max_ckpt_to_keep=1") == []
    for step in (10, 20, 30):  # they are there already
        (tmp_path / f"global_step_{step}").mkdir()
    assert find("checkpoints", target_of(*often)) == []


@needs_namespaces
def test_a_small_dev_shm():
    (line,) = in_child(
        lambda: find("shm", target_of(*TWO_ON_RAY)),
        lambda: mount(Path("/dev/shm"), "size=64m"),
        namespaces=CLONE_NEWNS,
    )
    assert "/dev/shm has 67.1 MB free" in line and "docker run --shm-size=" in line


@needs_namespaces
def test_a_chosen_network_card_that_is_not_there(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def plug() -> None:
        sh("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "veth0")
        sh("ip", "link", "set", "veth0", "up")
        sh("ip", "address", "add", "10.88.0.1/24", "dev", "eth0")
        sh("ip", "link", "set", "eth0", "up")
        give_up = time.monotonic() + 10
        while not all(psutil.net_if_stats()[card].isup for card in ("eth0", "veth0")):
            assert time.monotonic() < give_up  # the kernel takes up to a second
            time.sleep(0.01)

    def lines() -> list[str]:
        return in_child(lambda: find("network-card", target_of()), plug, namespaces=CLONE_NEWNET)

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "et")
    assert lines() == []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ens")
    assert "NCCL_SOCKET_IFNAME=ens names no card that is up (eth0, lo, veth0)" in lines()[0]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth")  # gloo takes whole names
    assert "GLOO_SOCKET_IFNAME=eth names no card" in lines()[0]


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    (finding,) = find("threads", target_of("trainer.n_gpus_per_node=8"))
    assert finding.do == "export OMP_NUM_THREADS=2"
    assert find("threads", target_of("trainer.n_gpus_per_node=4")) == []


def test_a_model_that_is_not_on_the_node(tmp_path):
    (tmp_path / "model").mkdir()
    target = target_of(f"actor_rollout_ref.model.path={tmp_path / 'model'}")
    assert find("shared-paths", target) == []
    (tmp_path / "model").rmdir()
    assert f"{tmp_path / 'model'} is not there" in find("shared-paths", target)[0].what


# -------------------------------------------------------------------------------- GPUs


def test_one_gpu_for_two_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,1")
    assert find("gpu-shared", target_of())[0].do == "export CUDA_VISIBLE_DEVICES=0,1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "all of them take the first" in find("gpu-shared", target_of())[0].why


def test_a_driver_that_torch_can_not_use(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine_checks, "DRIVER", tmp_path / "version")
    assert find("cuda", target_of()) == []
    (tmp_path / "version").write_text("NVRM version: Kernel Module  535.161.08\nGCC version:")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (finding,) = find("cuda", target_of())
    assert "built with CUDA 13.0, sees no GPU" in finding.what and finding.what.endswith("535.161.08")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in find("cuda", target_of())[0].what
    assert find("cuda", target_of("trainer.device=cpu")) == []


def test_gpus_that_others_hold_are_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda i: ((80, 30)[i] * 10**9, 85 * 10**9))
    (finding,) = find("gpu-health", target_of(is_thorough=True))
    assert "GPU 1 has 55.0 GB of 85.0 GB in use already" in finding.what


SMI = """#!/bin/sh
case "$1" in
    *ecc.errors.uncorrected.volatile.total*) cat "$(dirname "$0")/gpus" ;;
    --query-remapped-rows=*) cat "$(dirname "$0")/rows" ;;
esac
"""


def test_gpus_with_failed_memory_are_named_with_the_node_to_leave_out(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    # One in order, one without ECC, and two with faults.
    gpus = ("0, 00:1B, 0, No", "1, 00:2C, [N/A], [N/A]", "2, 00:3D, 4, No", "3, 00:4E, 0, No")
    (tmp_path / "gpus").write_text("\n".join(gpus))
    (tmp_path / "rows").write_text("00:1B, No, No\n00:3D, Yes, No\n00:4E, Yes, No\n")
    target = target_of(is_thorough=True)
    broken, waiting = find("gpu-ecc", target)
    assert (broken.level, waiting.level) == ("error", "warning")
    assert broken.what == "GPU 2 of node7 has 4 uncorrected ECC errors since the driver was loaded"
    assert waiting.what == "GPU 3 of node7 has memory rows that wait for their replacement"
    others = [broken, waiting, replace(broken, exclude="node2", machines=("node2",))]
    assert exclude_line(others) == "leave these nodes out: sbatch --exclude=node2,node7 ..."
    (tmp_path / "rows").write_text("00:4E, No, Yes\n")
    assert [finding.level for finding in find("gpu-ecc", target)] == ["error", "error"]
    lost = "Unable to determine the device handle for GPU 0000:4E:00.0: Unknown Error"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lost}'\nexit 15\n")
    (finding,) = find("gpu-ecc", target)
    assert finding.what == f"nvidia-smi says: {lost}" and finding.exclude == "node7"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(machine_checks, "SMI_SECONDS", 0.1)
    (finding,) = find("gpu-ecc", target)
    assert "nvidia-smi does not answer within 0.1 s" in finding.what and finding.exclude == "node7"
    assert find("gpu-ecc", target_of()) == []  # a run's start does not ask


def test_another_nccl_than_torchs_own_is_named(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fe:00 9 /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 fe:00 9 /opt/my nccl/libnccl.so.2.27.5\n"
    )
    code = [22_705]

    def library(path: str) -> SimpleNamespace:
        assert path == "/opt/my nccl/libnccl.so.2.27.5"
        return SimpleNamespace(ncclGetVersion=lambda pointer: setattr(pointer._obj, "value", code[0]))

    monkeypatch.setattr("ctypes.CDLL", library)
    assert loaded_nccl(maps).version == (2, 27, 5)
    assert loaded_nccl(tmp_path / "none") is None
    monkeypatch.setattr(machine_checks, "loaded_nccl", lambda: loaded_nccl(maps))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    assert find("nccl", target_of()) == []  # torch without CUDA
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (finding,) = find("nccl", target_of())
    assert finding.level == "error" and "NCCL 2.27.5 is loaded from /opt/my nccl/" in finding.what
    assert "was built with 2.28.9" in finding.what
    code[0] = 23_001
    assert find("nccl", target_of())[0].level == "warning"
    code[0] = 22_809
    assert find("nccl", target_of()) == []


def test_a_run_of_programs_needs_walls_or_a_code_server(monkeypatch):
    def refuse(*_: object) -> None:
        raise machine_checks.NoWalls("no user namespaces. Allow user namespaces (sysctl ...)")

    monkeypatch.delenv("CODE_API_URL", raising=False)
    monkeypatch.setattr(machine_checks, "choose_walls", refuse)
    for override in ("environment.env_class=lcb", "data.mixture=[{path: x.jsonl, verifier: code_stdio}]"):
        (finding,) = find("code-sandbox", target_of(override))
        assert "Allow user namespaces" in finding.line and "verifiers.code.api_url" in finding.line
        assert find("code-sandbox", target_of(override, "verifiers.code.api_url=http://10.0.0.1:1234")) == []
    assert find("code-sandbox", target_of()) == []  # searches run no program
