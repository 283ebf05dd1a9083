"""Troubles of a machine, provoked for real: control groups, limits, file systems, network cards."""

import json
import os
import resource
import time
from pathlib import Path

import pytest
from doctor_facts import (
    BASE_MODEL,
    CLONE_NEWNET,
    CLONE_NEWNS,
    can_unshare,
    facts_with,
    found,
    in_child,
    run_with,
    sh,
)

from verl.doctor.checks.disk import checkpoint_bytes, checkpoints_at_once
from verl.doctor.facts import Machine, Model, from_json, to_json
from verl.doctor.facts_limits import CGROUPS, look_at_limits
from verl.doctor.facts_machine import Order, look_at_machine
from verl.doctor.facts_models import look_at_model
from verl.doctor.facts_places import look_at_place
from verl.doctor.facts_ray import look_at_ray
from verl.doctor.facts_run import model_paths

needs_namespaces = pytest.mark.skipif(can_unshare() is not None, reason=str(can_unshare()))
ON_RAY = {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}


def machine_in_child(change, order: Order | None = None, namespaces: int = CLONE_NEWNS) -> Machine:
    """This machine as a child process sees it after `change()`."""

    def look():
        change()
        return to_json(look_at_machine(order or Order()))

    return from_json(Machine, in_child(look, namespaces=namespaces))


def test_this_machine_is_healthy_for_one_process_and_for_two():
    for settings in ({}, ON_RAY):
        order = Order(places=(("run folder", "/tmp/run"), ("Ray's files", "/tmp")))
        here = look_at_machine(order)
        assert found(facts_with(settings, here)) == []


LIMIT_FILES = {
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
    "memory": ("memory.limit_in_bytes", "memory.max"),
}


@pytest.fixture
def group(request):
    """A new control group that can limit `request.param`, cpu or memory."""
    kind = request.param
    for folder in (CGROUPS / kind / f"doctor_{os.getpid()}", CGROUPS / f"doctor_{os.getpid()}"):
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / name).exists() for name in LIMIT_FILES[kind]):
            yield folder
            remove(folder)
            return
        folder.rmdir()
    pytest.skip(f"no control group with a limit of its {kind} can be made here")


def remove(group: Path) -> None:
    for _ in range(200):  # a process that has just ended may still count as a member
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.01)


def set_limit(group: Path, name_v1: str, value_v1: str, name_v2: str, value_v2: str) -> None:
    is_v1 = (group / name_v1).exists()
    (group / (name_v1 if is_v1 else name_v2)).write_text(value_v1 if is_v1 else value_v2)


@pytest.mark.parametrize("group", ["cpu"], indirect=True)
def test_a_control_group_below_the_root_limits_what_ray_does_not_see(group):
    set_limit(group, "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000")

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    machine = machine_in_child(join, namespaces=0)
    assert machine.num_cpus == 0.5 and machine.num_cpus_ray == os.cpu_count()
    (finding,) = found(facts_with(ON_RAY, machine), "cpus")
    assert f"Ray counts {os.cpu_count()} cores, this job may use 0.5" in finding.what
    assert "--num-cpus=1" in finding.do
    assert found(facts_with({}, machine), "cpus") == []  # without Ray nobody counts


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_a_memory_limit_below_what_the_run_needs(group):
    set_limit(group, "memory.limit_in_bytes", str(2 * 10**9), "memory.max", str(2 * 10**9))

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    machine = machine_in_child(join, namespaces=0)
    page = resource.getpagesize()
    assert machine.memory_limit_bytes == 2 * 10**9 // page * page
    assert machine.memory_free_bytes <= machine.memory_limit_bytes < machine.memory_bytes
    model = Model("actor_rollout_ref.model.path", "/m", "folder", 500_000_000, 2)
    (finding,) = found(facts_with({}, machine, models=(model,)), "memory")
    assert "the control group's memory limit is 2.0 GB" in finding.what and "need 8.0 GB" in finding.what


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({"cpu.max": "max 1000", "a/cpu.max": "2000 1000", "a/b/cpu.max": "max 1000"}, "0::/a/b", 2.0),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b", 1.5),
        ({"cpu,cpuacct/job/cpu.cfs_quota_us": "70000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
         "4:cpu,cpuacct:/job", 0.7),
        ({"cpu/cpu.cfs_quota_us": "60000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/docker/not/here", 0.6),
    ],
)  # fmt: skip
def test_limits_of_both_versions_and_of_all_groups_above_count(tmp_path, files, own, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    limits = look_at_limits(tmp_path, tmp_path / "own")
    assert limits.num_cpus == min(expected, len(os.sched_getaffinity(0)))


def test_ray_counts_as_we_say():
    from ray._private.utils import get_num_cpus

    assert look_at_limits().num_cpus_ray == get_num_cpus(override_docker_cpu_warning=True)


def test_an_affinity_to_one_core_counts():
    def pin() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    assert machine_in_child(pin, namespaces=0).num_cpus == 1


def test_ulimit_of_a_child():
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 3000))

    machine = machine_in_child(limit, namespaces=0)
    assert "ulimit -n 256" in found(facts_with({}, machine), "open-files")[0].do
    assert "the administrator" in found(facts_with(ON_RAY, machine), "open-files")[0].do


@pytest.mark.parametrize("folder", ["/tmp/" + "long" * 20, "/no/such/folder"])
def test_a_folder_that_ray_can_not_work_in(monkeypatch, folder):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    (finding,) = found(facts_with(ON_RAY, ray=look_at_ray()), "ray-files")
    assert f"RAY_TMPDIR={folder}" in finding.what and finding.level.value == "error"


def mount(folder: Path, options: str) -> None:
    sh("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


@needs_namespaces
def test_a_read_only_run_folder(tmp_path):
    run_folder = tmp_path / "runs" / "new" / "deep"
    order = Order(places=(("run folder", str(run_folder)),))
    machine = machine_in_child(lambda: mount(tmp_path, "ro,size=1m"), order)
    (finding,) = found(facts_with({}, machine), "writable")
    assert f"{run_folder} can't be written (Read-only file system)" in finding.what
    assert not (tmp_path / "runs").exists()


@needs_namespaces
def test_a_full_home_and_a_full_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)

    def fill() -> None:
        mount(tmp_path, "size=200k")
        with open(tmp_path / "fill", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    order = Order(places=(("models from the hub", str(tmp_path / ".cache/huggingface/hub")),))
    model = Model("actor_rollout_ref.model.path", "org/name", "hub")
    findings = found(facts_with({}, machine_in_child(fill, order), models=(model,)), "home", "writable")
    assert [finding.check for finding in findings] == ["writable", "home"]
    assert all("No space left on device" in finding.what for finding in findings)
    assert "export HF_HOME=" in findings[0].do


@needs_namespaces
def test_a_disk_too_small_for_the_checkpoints(tmp_path):
    order = Order(places=(("run folder", str(tmp_path)),))
    machine = machine_in_child(lambda: mount(tmp_path, "size=40m"), order)
    model = look_at_model("actor_rollout_ref.model.path", str(BASE_MODEL), {})
    assert model.num_params is not None
    settings = {"trainer.save_freq": 10, "trainer.total_training_steps": 100}
    (finding,) = found(facts_with(settings, machine, models=(model,)), "checkpoints")
    assert f"4 checkpoints of about {16 * model.num_params / 1e9:.1f} GB" in finding.what
    fewer = settings | {"trainer.max_ckpt_to_keep": 1}
    assert found(facts_with(fewer, machine, models=(model,)), "checkpoints") == []
    assert found(facts_with(settings, machine, models=(model,), checkpoints_there=3), "checkpoints") == []


@needs_namespaces
def test_a_small_dev_shm():
    machine = machine_in_child(lambda: mount(Path("/dev/shm"), "size=64m"))
    (finding,) = found(facts_with(ON_RAY, machine), "shm")
    assert "/dev/shm has 0.1 GB free" in finding.what and "docker run --shm-size=" in finding.do
    assert found(facts_with({}, machine), "shm") == []


@needs_namespaces
def test_several_network_cards_and_a_chosen_one_that_is_not_there(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def plug() -> None:
        for number, name in enumerate(("eth0", "ib0", "docker0", "down0")):
            sh("ip", "link", "add", name, "type", "veth", "peer", "name", f"veth{number}")
            sh("ip", "link", "set", f"veth{number}", "up")
            sh("ip", "address", "add", f"10.88.{number}.1/24", "dev", name)
            if name != "down0":
                sh("ip", "link", "set", name, "up")

    two_nodes = {"trainer.nnodes": 2, "trainer.device": "cpu"}
    machine = machine_in_child(plug, namespaces=CLONE_NEWNET)
    (finding,) = found(facts_with(two_nodes, machine), "network-card")
    assert "eth0 (10.88.0.1), ib0 (10.88.1.1)" in finding.what
    assert found(facts_with({}, machine), "network-card") == []  # one node talks to nobody
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert found(facts_with(two_nodes, machine_in_child(plug, namespaces=CLONE_NEWNET)), "network-card") == []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ens")
    (finding,) = found(facts_with(two_nodes, machine_in_child(plug, namespaces=CLONE_NEWNET)), "network-card")
    assert "NCCL_SOCKET_IFNAME=ens names no card that is up (docker0, eth0, ib0, lo)" in finding.what


def test_a_place_is_looked_at_without_making_it(tmp_path):
    place = look_at_place("run folder", tmp_path / "a" / "b")
    assert place.problem is None and place.free_bytes > 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "is a file" in look_at_place("run folder", tmp_path / "file" / "b").problem


def write_model(folder: Path, tensors: dict[str, tuple[str, list[int]]], **config) -> None:
    """A model folder whose weights are zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512} | config))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4}[dtype] * shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_models_by_their_files(tmp_path):
    write_model(tmp_path / "m", {"a": ("BF16", [10, 20]), "b": ("F32", [3, 3])})
    model = look_at_model("key", str(tmp_path / "m"), {})
    assert (model.num_params, model.dtype_bytes, model.max_positions) == (209, 2, 512)
    assert model.where == "folder" and model.missing == ("tokenizer",)
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "was cut short" in look_at_model("key", str(tmp_path / "m"), {}).problem
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in look_at_model("key", str(tmp_path / "m"), {}).problem
    weights.unlink()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    assert look_at_model("key", str(tmp_path / "m"), {}).missing == (
        "weights",
        "tokenizer",
        "model-00001-of-00002.safetensors",
    )


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"rope_scaling": None}, None),
    ],
)
def test_positions_that_a_stretched_rope_adds_count(tmp_path, config, positions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert look_at_model("key", str(tmp_path), {}).max_positions == positions


def test_a_critics_model_is_looked_at_if_there_is_a_critic():
    models = {"actor_rollout_ref.model.path": "/a", "critic.model.path": "/b"}
    assert list(model_paths(run_with(models | {"algorithm.adv_estimator": "grpo"}))) == list(models)[:1]
    assert list(model_paths(run_with(models | {"algorithm.adv_estimator": "gae"}))) == list(models)


def test_a_model_that_is_not_in_the_cache_while_the_hub_is_off(tmp_path, monkeypatch):
    environment = {"HF_HOME": str(tmp_path)}
    assert look_at_model("key", "org/name", environment).where == "hub"
    assert look_at_model("key", "./not/there", environment).where == "nowhere"
    write_model(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc", {"a": ("F32", [2, 2])})
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    model = look_at_model("key", "org/name", environment)
    assert model.where == "cache" and model.num_params == 4
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = look_at_machine(Order())
    other = look_at_model("actor_rollout_ref.model.path", "org/other", environment)
    (finding,) = found(facts_with({}, here, models=(other,)), "hub-offline")
    assert "HF_HUB_OFFLINE=1" in finding.what and "hf download org/other" in finding.do
    assert found(facts_with({}, here, models=(model,)), "hub-offline") == []


def test_wandb_keys(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = {"trainer.logger": ["wandb"]}
    assert [f.check for f in found(facts_with(settings, look_at_machine(Order())))] == ["wandb-key"]
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    here = look_at_machine(Order())
    assert found(facts_with(settings, here), "wandb-key") == [] and "secret" not in json.dumps(to_json(here))


STEP_FOLDER_BYTES = 21_224_470  # of a GRPO run of the shipped model, as `du -sb global_step_80` said


def test_a_checkpoint_is_about_as_large_as_the_real_one():
    model = look_at_model("actor_rollout_ref.model.path", str(BASE_MODEL), {})
    assert checkpoint_bytes(run_with(), (model,)) == pytest.approx(STEP_FOLDER_BYTES, rel=0.05)


def test_the_size_of_checkpoints_and_how_many_there_are_at_once():
    policy = Model("actor_rollout_ref.model.path", "/m", "folder", 1000, 2)
    assert checkpoint_bytes(run_with(), (policy,)) == 16_000
    assert checkpoint_bytes(run_with({"algorithm.adv_estimator": "gae"}), (policy,)) == 28_000
    assert checkpoint_bytes(run_with({"actor_rollout_ref.model.lora_rank": 8}), (policy,)) == 4_000
    assert checkpoint_bytes(run_with(), (Model("actor_rollout_ref.model.path", "a/b", "hub"),)) is None
    plan = {"trainer.save_freq": 10, "trainer.total_training_steps": 25, "trainer.max_ckpt_to_keep": None}
    assert checkpoints_at_once(run_with(plan)) == (3, 3)
    assert checkpoints_at_once(run_with(plan | {"trainer.max_ckpt_to_keep": 2})) == (2, 3)
    assert checkpoints_at_once(run_with({"trainer.save_freq": -1})) == (1, 1)
