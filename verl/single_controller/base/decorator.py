"""The dispatch of a call on a worker group to its ranks, and the collection of their results into one.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto: ...

`register` marks a method of a Worker. A WorkerGroup gives each marked method to the driver under the same
name: the mode's dispatch function makes one (args, kwargs) for each rank, the ranks run the method, and the
mode's collect function joins what they return.

| mode                   | each rank gets                            | the driver gets                    |
|------------------------|-------------------------------------------|------------------------------------|
| ONE_TO_ALL             | all arguments                             | list with one result per rank      |
| ALL_TO_ALL             | entry `rank` of each argument, a list     | list with one result per rank      |
| DP_COMPUTE_PROTO       | its chunk of each DataProto, else whole   | one DataProto, rows in their order |
| MEGATRON_COMPUTE_PROTO | its replica's chunk of each DataProto     | the same, of each replica's leader |

Several processes may hold one replica of a model together. Each worker says by `data_position()` to which
replica it belongs, and whether it leads the replica. With `execute_mode=Execute.RANK_ZERO` only rank 0 runs,
and its result comes back bare. With `blocking=False` the driver at once gets a DataProtoFuture, whose `get()`
returns the result above. A method may be `async def`; its rank runs it to its end.

You make a mode of your own as a dict with verl's two functions. Give it to `register` or, with a name, to
`register_dispatch_mode`:

    dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs), each a list with one entry per rank
    collect_fn(worker_group, outputs)          -> the result; `outputs` is a list in the order of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from verl.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Method = TypeVar("Method", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Dispatch:
    """The names of the dispatch modes; `register_dispatch_mode` adds to them.

    The table above says what they do.
    """

    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    MEGATRON_COMPUTE_PROTO = "MEGATRON_COMPUTE_PROTO"

    @classmethod
    def register(cls, name: str) -> str:
        """Make `Dispatch.NAME` of a name; return it in capitals."""
        setattr(cls, name.upper(), name.upper())
        return name.upper()

    @classmethod
    def remove(cls, name: str) -> None:
        """Remove the attribute that `register` made."""
        delattr(cls, name.upper())


class Execute(str, Enum):
    """The ranks that run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class DataPosition:
    """The share of the rows that a process works on."""

    rank: int  # number of the model's replica that the process is a part of
    size: int  # number of replicas
    leads: bool = True  # whether its result is the replica's; true for one process of each replica


@dataclass
class Dispatched:
    """One call per rank, and the function that joins the ranks' results (given in rank order)."""

    calls: list[Call]
    collect: Callable[[list[Any]], Any]


ModeFunctions = Mapping[str, Callable[..., Any] | None]
"""{"dispatch_fn": .., "collect_fn": ..}; a built-in dispatch_fn returns Dispatched and needs no other."""


@dataclass(frozen=True)
class Registration:
    """The note that `register` makes about a method."""

    dispatch_mode: str | ModeFunctions
    execute_mode: Execute
    blocking: bool


REGISTRATION_ATTRIBUTE = "_worker_group_registration"
DISPATCH_MODE_FN_REGISTRY: dict[str, ModeFunctions] = {}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any] | None = None
) -> None:
    """Add a dispatch mode; `Dispatch.NAME` can then be given to `register`."""
    if dispatch_mode_name.upper() in DISPATCH_MODE_FN_REGISTRY:
        raise ValueError(f"there already is a dispatch mode {dispatch_mode_name.upper()!r}")
    update_dispatch_mode(Dispatch.register(dispatch_mode_name), dispatch_fn, collect_fn)


def update_dispatch_mode(
    dispatch_mode: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any] | None = None
) -> None:
    """Give a mode other functions."""
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_dispatch_fn(dispatch_mode: str) -> ModeFunctions:
    """Return the two functions of a mode."""
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register(
    dispatch_mode: str | ModeFunctions = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Mark a method of a Worker as callable through its WorkerGroup.

    Args:
        dispatch_mode: how arguments and results travel; see the table above.
        execute_mode: the ranks that run the method.
        blocking: whether a call waits for its result; if not, it returns a DataProtoFuture.
        materialize_futures: has no effect; it is verl's. Futures among arguments are resolved on the ranks.
    """
    if isinstance(dispatch_mode, Mapping):
        missing = [name for name in ("dispatch_fn", "collect_fn") if name not in dispatch_mode]
        if missing:
            raise ValueError(f"a dispatch mode given as a dict needs {' and '.join(missing)}")
    elif dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        names = ", ".join(sorted(DISPATCH_MODE_FN_REGISTRY))
        raise ValueError(f"no dispatch mode {dispatch_mode!r}; there are {names}")
    if execute_mode is Execute.RANK_ZERO and dispatch_mode != Dispatch.ONE_TO_ALL:
        raise ValueError(f"Execute.RANK_ZERO goes with Dispatch.ONE_TO_ALL, not with {dispatch_mode!r}")

    def mark(method: Method) -> Method:
        setattr(method, REGISTRATION_ATTRIBUTE, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return mark


def dispatch_call(
    dispatch_mode: str | ModeFunctions, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Dispatched:
    """Return what a call on a worker group becomes: one call per rank, and how the results are joined."""
    functions = (
        dispatch_mode if isinstance(dispatch_mode, Mapping) else get_predefined_dispatch_fn(dispatch_mode)
    )
    dispatch_fn = functions["dispatch_fn"]
    collect_fn = functions["collect_fn"]
    assert dispatch_fn is not None
    dispatched = dispatch_fn(group, *args, **kwargs)
    if isinstance(dispatched, Dispatched):
        return dispatched
    per_argument, per_keyword = dispatched
    calls = per_rank_calls(per_argument, per_keyword, group.world_size)
    return Dispatched(calls, list if collect_fn is None else partial(collect_fn, group))


def per_rank_calls(args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int) -> list[Call]:
    """Return a call for each rank, from arguments that are lists with an entry for each rank."""
    return [
        (tuple(values[rank] for values in args), {name: values[rank] for name, values in kwargs.items()})
        for rank in range(world_size)
    ]


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Return the registration of every marked method of a class, inherited ones too, by name."""
    marks = {
        name: getattr(getattr(worker_cls, name), REGISTRATION_ATTRIBUTE, None) for name in dir(worker_cls)
    }
    return {name: registration for name, registration in marks.items() if registration is not None}


def dispatch_one_to_all(group: Any, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Send all arguments to every rank."""
    return Dispatched([(args, kwargs)] * group.world_size, list)


def dispatch_all_to_all(group: Any, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Send entry `rank` of each argument, a list, to that rank."""
    world_size = group.world_size
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, list | tuple) or len(argument) != world_size:
            kind = (
                f"{len(argument)} entries" if isinstance(argument, list | tuple) else type(argument).__name__
            )
            raise ValueError(
                f"ALL_TO_ALL takes a list with one entry for each of {world_size} ranks, got {kind}"
            )
    return Dispatched(per_rank_calls(args, kwargs, world_size), list)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return a mode for workers that have called `_register_dispatch_collect_info` for that mesh.

    Methods of this mode take and return DataProto.
    """
    return {"dispatch_fn": _rows_mode(lambda group: group.mesh_positions(mesh_name)), "collect_fn": None}


def _rows_mode(positions_of: Callable[[Any], Sequence[DataPosition]]) -> Callable[..., Dispatched]:
    """Return a dispatch function that chunks rows for ranks in these positions; see `_dispatch_rows`."""

    def dispatch(group: Any, /, *args: Any, **kwargs: Any) -> Dispatched:
        return _dispatch_rows(positions_of(group), args, kwargs)

    return dispatch


def _dispatch_rows(
    positions: Sequence[DataPosition], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Dispatched:
    """Chunk each DataProto, padded to a multiple of the number of replicas.

    A future is chunked on the ranks.
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
        values_of_rank = [per_replica[position.rank] for per_replica in spread]
        calls.append(
            (tuple(values_of_rank[: len(args)]), dict(zip(kwargs, values_of_rank[len(args) :], strict=True)))
        )
    collect = partial(
        _collect_dp_proto,
        leaders=[leaders[replica] for replica in range(num_replicas)],
        num_rows=next(iter(num_rows), 0),
        num_padding=num_padding,
    )
    return Dispatched(calls, collect)


def _spread(value: Any, num_replicas: int) -> list[Any]:
    """Return what each replica gets of an argument.

    A single replica gets the same tensors in containers of its own.
    """
    if isinstance(value, DataProtoFuture):
        return value.chunk(num_replicas) if num_replicas > 1 else [value]
    if not isinstance(value, DataProto):
        return [value] * num_replicas
    if num_replicas == 1:
        return [value.select()]
    return pad_dataproto_to_divisor(value, num_replicas)[0].chunk(num_replicas)


def _collect_dp_proto(outputs: list[Any], leaders: list[int], num_rows: int, num_padding: int) -> DataProto:
    """Return the rows of all replicas without the padding.

    Outputs without rows (metrics only) are just joined.
    """
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


def _one_replica_per_rank(group: Any) -> list[DataPosition]:
    """Return the positions of processes that each hold a replica (or a shard, but rows of their own)."""
    return [DataPosition(rank, group.world_size) for rank in range(group.world_size)]


update_dispatch_mode(Dispatch.ONE_TO_ALL, dispatch_one_to_all)
update_dispatch_mode(Dispatch.ALL_TO_ALL, dispatch_all_to_all)
update_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, _rows_mode(_one_replica_per_rank))
update_dispatch_mode(Dispatch.MEGATRON_COMPUTE_PROTO, _rows_mode(lambda group: group.data_positions))
