"""How calls are cut for the ranks and results joined, without any process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sample_workers import sample_batch

from verl.single_controller import (
    DataPosition,
    Dispatch,
    Execute,
    Worker,
    create_colocated_worker_cls,
    register,
)
from verl.single_controller.base.decorator import (
    Dispatched,
    dispatch_call,
    register_dispatch_mode,
    registered_methods,
)
from verl.single_controller.base.worker_group import ClassWithInitArgs


def dispatch(mode: str, world_size: int, *args, **kwargs) -> Dispatched:
    return dispatch_call(mode, SimpleNamespace(world_size=world_size), args, kwargs)


@pytest.mark.parametrize(("num_rows", "world_size"), [(1, 3), (5, 2), (6, 3), (7, 4)])
def test_chunks_are_equal_and_their_padding_is_taken_off_again(num_rows, world_size):
    dispatched = dispatch(Dispatch.DP_COMPUTE_PROTO, world_size, sample_batch(num_rows))
    parts = [args[0] for args, _ in dispatched.calls]
    assert len(parts) == world_size and len({len(part) for part in parts}) == 1
    assert dispatched.collect(parts).batch["x"].tolist() == list(range(num_rows))


def test_processes_of_one_replica_get_the_same_rows_and_its_leader_answers():
    positions = [DataPosition(replica, 2, leads) for replica, leads in [(0, 0), (1, 1), (0, 1), (1, 0)]]
    group = SimpleNamespace(world_size=4, data_positions=positions)
    dispatched = dispatch_call(Dispatch.MEGATRON_COMPUTE_PROTO, group, (sample_batch(5), "all"), {})
    rows = [args[0].batch["x"].tolist() for args, _ in dispatched.calls]
    assert rows[0] == rows[2] == [0, 1, 2] and rows[1] == rows[3] and rows[1][:2] == [3, 4]
    assert {args[1] for args, _ in dispatched.calls} == {"all"}
    outputs = [
        args[0] if position.leads else None
        for (args, _), position in zip(dispatched.calls, positions, strict=True)
    ]
    assert dispatched.collect(outputs).batch["x"].tolist() == [0, 1, 2, 3, 4]


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


def test_register_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="no dispatch mode 'nope'; there are.*ONE_TO_ALL"):
        register(dispatch_mode="nope")
    with pytest.raises(ValueError, match="RANK_ZERO goes with"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="already is"):
        register_dispatch_mode("one_to_all", lambda group: ((), {}))
    with pytest.raises(ValueError, match="needs collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})


def test_registered_methods_are_inherited_and_plain_ones_are_not_offered():
    class Base(Worker):
        @register()
        def offered(self) -> None: ...

        def plain(self) -> None: ...

    class Derived(Base):
        @register(blocking=False)
        def more(self) -> None: ...

    assert sorted(registered_methods(Derived)) == ["data_position", "mesh_rank", "more", "offered"]
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


def test_only_plain_worker_classes_are_taken():
    with pytest.raises(ValueError, match="a Worker class is needed"):
        ClassWithInitArgs(dict)
