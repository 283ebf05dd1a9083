"""The in-process backend and what both backends share on the driver's side."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from sample_workers import ScaleWorker, SumWorker, sample_batch

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    build_worker_groups,
    register,
)


@pytest.fixture
def groups():
    roles = {"scale": ClassWithInitArgs(ScaleWorker, factor=3), "sum": ClassWithInitArgs(SumWorker)}
    groups = build_worker_groups("local", ResourcePool([1]), roles)
    yield groups
    groups["scale"].shutdown()


def test_each_role_has_its_own_methods_under_their_own_names(groups):
    assert groups["scale"].scale(sample_batch(3), offset=1).batch["y"].tolist() == [1, 4, 7]
    assert groups["sum"].add_up(sample_batch(3)).batch["total"].tolist() == [3, 3, 3]
    with pytest.raises(AttributeError, match="'sum' has no method 'scale'; there are .*add_up"):
        groups["sum"].scale(sample_batch(3))


def test_one_to_all_gives_a_list_rank_zero_and_all_to_all_as_with_many_ranks(groups):
    assert groups["scale"].describe("hello") == ["hello from 0 of 1"]
    assert groups["scale"].set_factor_on_rank_zero(5) == 0
    assert groups["scale"].scale(sample_batch(2)).batch["y"].tolist() == [0, 5]
    assert groups["scale"].add_rank([4]) == [4]


def test_a_call_that_does_not_block_gives_a_future_that_other_calls_take(groups):
    future = groups["scale"].scale_later(sample_batch(3))
    assert isinstance(future, DataProtoFuture)
    assert groups["scale"].scale(future).batch["y"].tolist() == [0, 9, 18]
    assert future.get().batch["x"].tolist() == [0, 3, 6]


def test_results_pass_by_reference():
    class Keeper(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def give_back(self, data: DataProto) -> DataProto:
            return data

    group = build_worker_groups("local", ResourcePool([1]), {"keeper": ClassWithInitArgs(Keeper)})["keeper"]
    data = sample_batch(3)
    assert group.give_back(data).batch["x"].data_ptr() == data.batch["x"].data_ptr()


def test_shutdown_closes_the_workers_once_in_reverse_order_and_ends_all_roles():
    closed = []

    class Closing(Worker):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        @register()
        def ping(self) -> str:
            return self.name

        def close(self) -> None:
            closed.append(self.name)

    roles = {name: ClassWithInitArgs(Closing, name) for name in ("first", "second")}
    groups = build_worker_groups("local", ResourcePool([1]), roles)
    with groups["first"]:
        assert groups["second"].ping() == ["second"]
    groups["second"].shutdown()
    assert closed == ["second", "first"]
    with pytest.raises(RuntimeError, match="was shut down; second_ping cannot run"):
        groups["second"].ping()


def test_what_the_backend_cannot_do_is_refused():
    item = ClassWithInitArgs(SumWorker)
    with pytest.raises(ValueError, match="one process, the pool asks for 2"):
        build_worker_groups("local", ResourcePool([2]), {"sum": item})
    with pytest.raises(ValueError, match="must be 'local' or 'ray'"):
        build_worker_groups("slurm", ResourcePool([1]), {"sum": item})


def test_a_worker_leaves_the_process_group_that_it_joined_and_no_other(monkeypatch):
    """An engine of vLLM in the same process has a process group of its own, which outlives the worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        beside = Worker()
        beside.init_process_group("cpu")
        beside.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()

    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(rendezvous.port))
    worker = Worker()
    monkeypatch.setattr(worker, "world_size", 2)
    monkeypatch.setattr(dist, "init_process_group", partial(alone, dist.init_process_group))
    worker.init_process_group("cpu")
    assert dist.is_initialized()
    worker.close()
    assert not dist.is_initialized()


def alone(init_process_group, backend, *, world_size, **arguments):
    """Join with one process where a test has no second one."""
    init_process_group(backend, world_size=1, **arguments)
