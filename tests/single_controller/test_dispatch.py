"""How calls are cut for the ranks and results joined, without any process."""

from __future__ import annotations

import pytest
import torch
from sample_workers import sample_batch

from verl.protocol import DataProto
from verl.single_controller import (
    DataPosition,
    Dispatch,
    Execute,
    ResourcePool,
    Worker,
    create_colocated_worker_cls,
    register,
)
from verl.single_controller.base.decorator import (
    Dispatched,
    get_dispatch_mode,
    register_dispatch_mode,
    registered_methods,
)
from verl.single_controller.base.worker import environment
from verl.single_controller.base.worker_group import ClassWithInitArgs


def dispatch(mode: Dispatch, world_size: int, *args, **kwargs) -> Dispatched:
    return get_dispatch_mode(mode.value).dispatch(DataPosition.of_ranks(world_size), args, kwargs)


@pytest.mark.parametrize(("num_rows", "world_size"), [(1, 3), (5, 2), (6, 3), (7, 4)])
def test_chunks_are_equal_and_their_padding_is_taken_off_again(num_rows, world_size):
    dispatched = dispatch(Dispatch.DP_COMPUTE_PROTO, world_size, sample_batch(num_rows))
    parts = [args[0] for args, _ in dispatched.calls]
    assert len(parts) == world_size and len({len(part) for part in parts}) == 1
    assert dispatched.collect(parts).batch["x"].tolist() == list(range(num_rows))


def test_processes_of_one_replica_get_the_same_rows_and_its_leader_answers():
    mode = get_dispatch_mode(Dispatch.MEGATRON_COMPUTE_PROTO.value)
    assert mode.by_replica
    positions = [DataPosition(replica, 2, leads) for replica, leads in [(0, 0), (1, 1), (0, 1), (1, 0)]]
    dispatched = mode.dispatch(positions, (sample_batch(5), "all"), {})
    rows = [args[0].batch["x"].tolist() for args, _ in dispatched.calls]
    assert rows[0] == rows[2] == [0, 1, 2] and rows[1] == rows[3] and rows[1][:2] == [3, 4]
    assert {args[1] for args, _ in dispatched.calls} == {"all"}
    outputs = [
        args[0] if position.leads else None
        for (args, _), position in zip(dispatched.calls, positions, strict=True)
    ]
    assert dispatched.collect(outputs).batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_padding_rows_weigh_nothing():
    data = sample_batch(3)
    data.batch["response_mask"] = torch.ones(3, 4, dtype=torch.int64)
    parts = [args[0] for args, _ in dispatch(Dispatch.DP_COMPUTE_PROTO, 2, data).calls]
    assert sum(int(part.batch["response_mask"].sum()) for part in parts) == 12


def test_keyword_batches_are_cut_too_and_other_arguments_go_whole_to_every_rank():
    calls = dispatch(
        Dispatch.DP_COMPUTE_PROTO, 2, sample_batch(4), "a", other=sample_batch(4), flag=True
    ).calls
    assert [(len(args[0]), args[1], len(kw["other"]), kw["flag"]) for args, kw in calls] == [
        (2, "a", 2, True)
    ] * 2


def test_batches_of_different_lengths_or_none_at_all_are_refused():
    with pytest.raises(ValueError, match=r"number of rows: \[3, 4\]"):
        dispatch(Dispatch.DP_COMPUTE_PROTO, 2, sample_batch(4), sample_batch(3))
    with pytest.raises(ValueError, match="needs a DataProto argument"):
        dispatch(Dispatch.DP_COMPUTE_PROTO, 2, 1)


def test_one_rank_works_on_the_same_memory_in_containers_of_its_own():
    data = sample_batch(3)
    (part,), _ = dispatch(Dispatch.DP_COMPUTE_PROTO, 1, data).calls[0]
    assert part.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    part.pop(["x"])
    part.meta_info["step"] = 8
    assert "x" in data.batch and data.meta_info["step"] == 7


def test_outputs_without_rows_have_the_mean_of_the_ranks_figures():
    collect = dispatch(Dispatch.DP_COMPUTE_PROTO, 2, sample_batch(3)).collect
    joined = collect([DataProto(meta_info={"metrics": {"loss": loss}}) for loss in (1.0, 2.0)])
    assert joined.meta_info["metrics"] == {"loss": 1.5}
    with pytest.raises(TypeError, match="must return a DataProto, it returned.*NoneType"):
        collect([None, DataProto()])


def test_padding_is_not_taken_off_a_result_with_another_number_of_rows():
    collect = dispatch(Dispatch.DP_COMPUTE_PROTO, 2, sample_batch(3)).collect
    with pytest.raises(ValueError, match="3 rows were sent with 1 rows of padding and 2 came back"):
        collect([sample_batch(1), sample_batch(1)])


def test_all_to_all_gives_each_rank_its_entry():
    assert dispatch(Dispatch.ALL_TO_ALL, 2, [1, 2], k=["a", "b"]).calls == [
        ((1,), {"k": "a"}),
        ((2,), {"k": "b"}),
    ]
    with pytest.raises(ValueError, match="each of 2 ranks, got 3 entries"):
        dispatch(Dispatch.ALL_TO_ALL, 2, [1, 2, 3])
    with pytest.raises(ValueError, match="got int"):
        dispatch(Dispatch.ALL_TO_ALL, 2, 1)


def test_register_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="no dispatch mode 'nope'; there are.*one_to_all"):
        register(dispatch_mode="nope")
    with pytest.raises(ValueError, match="RANK_ZERO goes with"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="already is"):
        register_dispatch_mode("one_to_all", get_dispatch_mode("one_to_all").dispatch)


def test_registered_methods_are_inherited_and_plain_ones_are_not_offered():
    class Base(Worker):
        @register()
        def offered(self) -> None: ...

        def plain(self) -> None: ...

    class Derived(Base):
        @register(blocking=False)
        def more(self) -> None: ...

    assert sorted(registered_methods(Derived)) == ["data_position", "more", "offered"]
    assert not registered_methods(Derived)["more"].blocking


def test_two_roles_with_one_method_name_between_them_are_refused():
    class A(Worker):
        @register()
        def b_c(self) -> None: ...

    class B(Worker):
        @register()
        def c(self) -> None: ...

    with pytest.raises(ValueError, match="'a_b_c'"):
        create_colocated_worker_cls({"a": ClassWithInitArgs(A), "a_b": ClassWithInitArgs(B)})
    with pytest.raises(ValueError, match="at least one role"):
        create_colocated_worker_cls({})


def test_a_worker_reads_its_place_from_the_environment():
    with environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}):
        worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank) == (3, 4, 1)
    with environment({"RANK": "4", "WORLD_SIZE": "4"}), pytest.raises(ValueError, match="below WORLD_SIZE=4"):
        Worker()
    with (
        environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": None, "MASTER_PORT": None}),
        pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must be set"),
    ):
        Worker().init_process_group("cpu")


def test_a_pool_knows_the_place_of_every_rank():
    pool = ResourcePool([2, 1])
    assert pool.world_size == 3 and pool.places == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(ValueError, match="at least one process per node"):
        ResourcePool([2, 0])


def test_only_plain_worker_classes_are_taken():
    with pytest.raises(ValueError, match="a Worker class is needed"):
        ClassWithInitArgs(dict)
