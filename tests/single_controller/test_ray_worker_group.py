"""The Ray backend: same results as the local one, a working process group, and clear errors."""

from __future__ import annotations

import os
import time

import pytest
from sample_workers import ScaleWorker, SumWorker, sample_batch

from verl.single_controller import ClassWithInitArgs, ResourcePool, Worker, build_worker_groups, register
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.names import RunNames
from verl.utils.device import get_device_name

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_backend():
    backend = pytest.importorskip("verl.single_controller.ray")
    with backend.init_ray(num_cpus=2):
        yield backend


@pytest.fixture(scope="module")
def groups(ray_backend):
    roles = {"scale": ClassWithInitArgs(ScaleWorker, factor=3), "sum": ClassWithInitArgs(SumWorker)}
    groups = build_worker_groups("ray", ResourcePool([2]), roles)
    yield groups
    groups["scale"].shutdown()


def _process_is_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_two_ray_ranks_and_one_local_rank_give_the_same_rows(groups, num_rows):
    local = build_worker_groups(
        "local", ResourcePool([1]), {"scale": ClassWithInitArgs(ScaleWorker, factor=3)}
    )
    batch = sample_batch(num_rows)
    ours, theirs = (group.scale(batch, offset=1) for group in (groups["scale"], local["scale"]))
    assert ours.batch["y"].tolist() == theirs.batch["y"].tolist() == [3 * i + 1 for i in range(num_rows)]
    assert ours.non_tensor_batch["names"].tolist() == theirs.non_tensor_batch["names"].tolist()


def test_a_group_is_built_with_verls_arguments(ray_backend):
    """As verl 0.9.1's tests/single_controller/test_colocated_workers.py builds them."""
    pool = ray_backend.RayResourcePool(process_on_nodes=[1])
    cls = ray_backend.RayClassWithInitArgs(cls=ScaleWorker, factor=3)
    with ray_backend.RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=cls, device_name=get_device_name()
    ) as group:
        assert group.scale(sample_batch(2), offset=1).batch["y"].tolist() == [1, 4]


class ReadsVariables(Worker):
    @register()
    def variables(self, names):
        return [os.environ.get(name) for name in names]


def test_worker_env_reaches_each_process(ray_backend):
    """verl 0.9.1's tests/single_controller/test_ray_local_envs_on_cpu.py expects the same."""
    group = ray_backend.RayWorkerGroup(
        ray_backend.RayResourcePool([2]),
        ClassWithInitArgs(ReadsVariables),
        worker_env={"test_key": "test_value", "HF_TOKEN": "a secret"},
    )
    with group:
        read = group.variables(["test_key", "HF_TOKEN", "RAY_LOCAL_WORLD_SIZE"])
        assert read == [["test_value", "a secret", "2"]] * 2


def test_roles_of_one_pool_live_in_the_same_processes(groups):
    pids = groups["scale"].pid()
    assert pids == groups["sum"].pid()
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert groups["sum"].add_up(sample_batch(4)).batch["total"].tolist() == [1, 1, 5, 5]


def test_a_future_goes_from_group_to_group_without_a_stop_on_the_driver(groups):
    future = groups["scale"].scale_later(sample_batch(4))
    assert groups["scale"].scale(future).batch["y"].tolist() == [0, 9, 18, 27]
    assert future.get().batch["x"].tolist() == [0, 3, 6, 9]
    with pytest.raises(ValueError, match="3 rows do not make 2 equal chunks"):
        groups["scale"].scale(groups["scale"].scale_later(sample_batch(3)))


def test_an_exception_of_a_worker_arrives_with_its_type_its_message_and_its_rank(groups):
    with pytest.raises(KeyError, match="no such thing") as caught:
        groups["scale"].fail([None, "no such thing"])
    assert type(caught.value) is KeyError
    assert "rank 1 of worker group" in str(caught.value.__cause__) and "def fail" not in str(caught.value)
    assert groups["scale"].describe("still here")[1] == "still here from 1 of 2"


def test_a_killed_rank_is_named_at_once_although_others_wait_for_it(ray_backend):
    with ray_backend.RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(ScaleWorker, 2)) as group:
        start = time.monotonic()
        pid = group.pid()[1]
        named = rf"rank 1 .* on node .*, pid {pid}\) was killed by SIGKILL during die_in_all_reduce, or ended"
        with pytest.raises(WorkerDiedError, match=named):
            group.die_in_all_reduce(1)
        assert time.monotonic() - start < 200, "below the 240 s after which the other rank would give up"
        with pytest.raises(WorkerDiedError, match="rank 1"):
            group.describe("anybody there")


def test_the_processes_of_a_run_have_names_which_are_free_again_at_once(ray_backend):
    from verl.single_controller.ray import session

    pool = ResourcePool([2])
    pool.names = RunNames.of("quickstart", "verl_checkpoints/quickstart")
    pool.role = "trainer"
    expected = ["quickstart/trainer-0", "quickstart/trainer-1"]
    for _ in range(2):
        with ray_backend.RayWorkerGroup(pool, ClassWithInitArgs(ScaleWorker, 2)) as group:
            assert sorted(session.names_in(pool.names.namespace)) == expected
            with pytest.raises(KeyError) as caught:
                group.fail([None, "no such thing"])
            assert str(caught.value.__cause__).startswith("trainer-1 failed in fail")


class VariablesWorker(Worker):
    """Says what it finds in its environment."""

    @register()
    def variables(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]


def test_a_worker_gets_the_drivers_variables_by_name_and_the_drivers_own_key_not(ray_backend, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "WANDB_API_KEY", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "1")
    item = ClassWithInitArgs(VariablesWorker)
    with ray_backend.RayWorkerGroup(ResourcePool([1]), item) as group:
        found = group.variables(["HF_HUB_OFFLINE", "HF_TOKEN", "WANDB_API_KEY", "SOMETHING_ELSE"])
    assert found == [["1", "1", None, None]]


def test_shutdown_ends_the_processes_and_forbids_further_calls(ray_backend):
    group = ray_backend.RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(ScaleWorker, 2))
    pids = group.pid()
    group.shutdown()
    group.shutdown()
    assert all(_process_is_gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="was shut down"):
        group.pid()


def test_a_class_decorated_by_ray_remote_is_taken_as_its_plain_class(ray_backend):
    import ray

    assert ray_backend.RayClassWithInitArgs(cls=ray.remote(SumWorker)).cls is SumWorker
