"""How a call on a worker group becomes calls on its ranks, and their results one result again.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto: ...

`register` marks a Worker's method. A WorkerGroup gives each marked method to the driver under the same name:
the mode's dispatch function makes one (args, kwargs) for each rank, the ranks run the method, the mode's
collect function joins what they return.

| mode                   | each rank gets                            | the driver gets                    |
|------------------------|-------------------------------------------|------------------------------------|
| ONE_TO_ALL             | all arguments                             | list with one result per rank      |
| ALL_TO_ALL             | entry `rank` of each argument, a list     | list with one result per rank      |
| DP_COMPUTE_PROTO       | its chunk of each DataProto, else whole   | one DataProto, rows in their order |
| MEGATRON_COMPUTE_PROTO | its replica's chunk of each DataProto     | the same, of each replica's leader |

Several processes may hold one replica of a model together: each worker says by `data_position()` which
replica it belongs to, and whether it leads it. Modes registered with `by_replica` are given these positions.
With `execute_mode=Execute.RANK_ZERO` only rank 0 runs and its result comes back bare. With `blocking=False`
the driver gets a DataProtoFuture at once, whose `get()` gives the above. `register_dispatch_mode` adds modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from verl.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Method = TypeVar("Method", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Dispatch(str, Enum):
    """The built-in dispatch modes; see the table above."""

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    MEGATRON_COMPUTE_PROTO = "megatron_compute_proto"


class Execute(str, Enum):
    """Which ranks run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class DataPosition:
    """Which share of the rows a process works on.

    Attributes:
        rank: number of the model's replica that the process is a part of; `size`: number of replicas.
        leads: its result is the replica's; true for one process of each replica.
    """

    rank: int
    size: int
    leads: bool = True

    @classmethod
    def of_ranks(cls, world_size: int) -> list[DataPosition]:
        """The positions of processes that each hold a replica (or a shard of it, but rows of their own)."""
        return [cls(rank, world_size) for rank in range(world_size)]


@dataclass
class Dispatched:
    """One call per rank, and the function that joins the ranks' results (given in rank order)."""

    calls: list[Call]
    collect: Callable[[list[Any]], Any]


DispatchFn = Callable[[Sequence[DataPosition], tuple[Any, ...], dict[str, Any]], Dispatched]
"""(position of each rank, args, kwargs) -> Dispatched. `collect` must be picklable: a future carries it."""


@dataclass(frozen=True)
class DispatchMode:
    """A dispatch function; by_replica: it wants the workers' own positions, not one replica for each rank."""

    dispatch: DispatchFn
    by_replica: bool


@dataclass(frozen=True)
class Registration:
    """What `register` noted about a method."""

    dispatch_mode: str
    execute_mode: Execute
    blocking: bool


REGISTRATION_ATTRIBUTE = "_worker_group_registration"
_DISPATCH_MODES: dict[str, DispatchMode] = {}


def register_dispatch_mode(name: str, dispatch: DispatchFn, by_replica: bool = False) -> None:
    """Adds a dispatch mode; its name can then be given to `register`."""
    if name in _DISPATCH_MODES:
        raise ValueError(f"there already is a dispatch mode {name!r}")
    _DISPATCH_MODES[name] = DispatchMode(dispatch, by_replica)


def get_dispatch_mode(name: str) -> DispatchMode:
    """The dispatch mode of a name."""
    return _DISPATCH_MODES[name]


def register(
    dispatch_mode: Dispatch | str = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[Method], Method]:
    """Marks a Worker's method as callable through its WorkerGroup; see the module's docstring."""
    mode = dispatch_mode.value if isinstance(dispatch_mode, Dispatch) else dispatch_mode
    if mode not in _DISPATCH_MODES:
        raise ValueError(f"no dispatch mode {mode!r}; there are {sorted(_DISPATCH_MODES)}")
    if execute_mode is Execute.RANK_ZERO and mode != Dispatch.ONE_TO_ALL.value:
        raise ValueError(f"Execute.RANK_ZERO goes with Dispatch.ONE_TO_ALL, not with {mode!r}")

    def mark(method: Method) -> Method:
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(mode, execute_mode, blocking))
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Name -> registration of every marked method of a class, inherited ones too."""
    found = {
        name: getattr(getattr(worker_cls, name), REGISTRATION_ATTRIBUTE, None) for name in dir(worker_cls)
    }
    return {name: registration for name, registration in found.items() if registration is not None}


def _as_list(outputs: list[Any]) -> list[Any]:
    return outputs


def _dispatch_one_to_all(
    positions: Sequence[DataPosition], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Dispatched:
    return Dispatched([(args, kwargs)] * len(positions), _as_list)


def _dispatch_all_to_all(
    positions: Sequence[DataPosition], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Dispatched:
    world_size = len(positions)
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, list | tuple) or len(argument) != world_size:
            found = (
                f"{len(argument)} entries" if isinstance(argument, list | tuple) else type(argument).__name__
            )
            raise ValueError(
                f"ALL_TO_ALL takes a list with one entry for each of {world_size} ranks, got {found}"
            )
    calls = [
        (tuple(argument[rank] for argument in args), {key: value[rank] for key, value in kwargs.items()})
        for rank in range(world_size)
    ]
    return Dispatched(calls, _as_list)


def _dispatch_dp_proto(
    positions: Sequence[DataPosition], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Dispatched:
    """Chunks each DataProto, padded to a multiple of the number of replicas; a future is chunked on the
    ranks.
    """
    num_replicas = positions[0].size
    leaders = {position.rank: rank for rank, position in enumerate(positions) if position.leads}
    values = [*args, *kwargs.values()]
    num_rows = {len(value) for value in values if isinstance(value, DataProto)}
    if len(num_rows) > 1:
        raise ValueError(f"the DataProto arguments differ in their number of rows: {sorted(num_rows)}")
    if not any(isinstance(value, DataProto | DataProtoFuture) for value in values):
        raise ValueError(
            f"DP_COMPUTE_PROTO needs a DataProto argument, got {[type(v).__name__ for v in values]}"
        )
    num_padding = -next(iter(num_rows), 0) % num_replicas
    spread = [_spread(value, num_replicas) for value in values]
    calls: list[Call] = []
    for position in positions:
        own = [per_replica[position.rank] for per_replica in spread]
        calls.append((tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True))))
    collect = partial(
        _collect_dp_proto,
        leaders=[leaders[replica] for replica in range(num_replicas)],
        num_rows=next(iter(num_rows), 0),
        num_padding=num_padding,
    )
    return Dispatched(calls, collect)


def _spread(value: Any, num_replicas: int) -> list[Any]:
    """What each replica gets. A single one gets the same tensors in containers of its own."""
    if isinstance(value, DataProtoFuture):
        return value.chunk(num_replicas) if num_replicas > 1 else [value]
    if not isinstance(value, DataProto):
        return [value] * num_replicas
    if num_replicas == 1:
        return [value.select()]
    return pad_dataproto_to_divisor(value, num_replicas)[0].chunk(num_replicas)


def _collect_dp_proto(outputs: list[Any], leaders: list[int], num_rows: int, num_padding: int) -> DataProto:
    """The rows of all replicas without the padding. Outputs without rows (metrics only) are just joined."""
    outputs = [outputs[rank] for rank in leaders]
    wrong = {type(output).__name__ for output in outputs if not isinstance(output, DataProto)}
    if wrong:
        raise TypeError(f"a DP_COMPUTE_PROTO method must return a DataProto, it returned {sorted(wrong)}")
    joined = outputs[0] if len(outputs) == 1 else DataProto.concat(outputs)
    if num_padding == 0 or len(joined) == 0:
        return joined
    if len(joined) != num_rows + num_padding:
        raise ValueError(
            f"{num_rows} rows were sent with {num_padding} rows of padding and {len(joined)} came back; "
            "return one row for each row, or none, so that the padding can be taken off"
        )
    return unpad_dataproto(joined, num_padding)


register_dispatch_mode(Dispatch.ONE_TO_ALL.value, _dispatch_one_to_all)
register_dispatch_mode(Dispatch.ALL_TO_ALL.value, _dispatch_all_to_all)
register_dispatch_mode(Dispatch.DP_COMPUTE_PROTO.value, _dispatch_dp_proto)
register_dispatch_mode(Dispatch.MEGATRON_COMPUTE_PROTO.value, _dispatch_dp_proto, by_replica=True)
