"""Columns over tokens go from worker to worker through Ray's object store, past the driver.

    worker's result --split--> what the driver gets | columns [N, W], an object of its own
    driver's batch: `stored`, references to such objects
    next call --detach--> call without references | references --attach, in the actor--> batches of tensors

Both objects belong to the driver, so they are freed as soon as no batch of it refers to them. The one with
the columns stays on the node that made it until an actor elsewhere has a call with rows of it: Ray brings it
there (once for a node) before the call runs, and its arrays are read where they lie. (Ray sends objects below
100 kB along with its own messages, the driver's included.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray import ObjectRef

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Call
from verl.utils.stored_columns import PackedColumn, StoredColumns, pack

StoredResult = tuple[ObjectRef, ObjectRef]  # what the driver gets, the columns over tokens


def start(actor: Any, method: str, call: Call) -> ObjectRef:
    """Starts a method on a `RankProcess`; the whole result will come to who asks for it."""
    small, references = detach(call)
    return actor.run.remote(method, small, *references)


def start_apart(actor: Any, method: str, call: Call) -> StoredResult:
    """Starts a method on a `RankProcess`; the columns over tokens of its result stay in the object store."""
    small, references = detach(call)
    handles = actor.run_apart.options(num_returns=2).remote(method, small, *references)
    return handles[0], handles[1]


def detach(call: Call) -> tuple[Call, list[ObjectRef]]:
    """The call with numbers in place of the references in its batches, and the references."""
    references: dict[ObjectRef, int] = {}

    def number_of(reference: ObjectRef) -> int:
        return references.setdefault(reference, len(references))

    def detached(value: Any) -> Any:
        if not isinstance(value, DataProto) or value.stored is None:
            return value
        stored = value.stored.needed().with_contents(number_of)
        return DataProto(value.batch, value.non_tensor_batch, value.meta_info, stored)

    return _mapped(call, detached), list(references)


def attach(call: Call, contents: tuple[dict[str, PackedColumn], ...]) -> Call:
    """The call with tensors in its batches, from the contents of the references that `detach` found."""

    def content_of(content: Any) -> Any:
        return ray.get(content) if isinstance(content, ObjectRef) else contents[content]

    def attached(value: Any) -> Any:
        if not isinstance(value, DataProto) or value.stored is None:
            return value
        fetched = DataProto.from_dict(value.stored.with_contents(content_of).tensors())
        return DataProto(value.batch, value.non_tensor_batch, value.meta_info).union(fetched)

    return _mapped(call, attached)


def split(result: Any) -> tuple[Any, dict[str, PackedColumn] | None]:
    """(what the driver gets, the columns over tokens) of a worker's result."""
    if not isinstance(result, DataProto) or result.batch is None:
        return result, None
    widths = result.widths
    if not widths:
        return result, None
    columns: dict[str, Any] = dict(result.batch.items())
    rest = result.select([name for name in columns if name not in widths])
    rest.stored = StoredColumns.of(None, widths, len(result))
    return rest, pack({name: columns[name] for name in widths})


def resolve_apart(handles: list[StoredResult], resolve: Callable[[list[ObjectRef]], list[Any]]) -> list[Any]:
    """The workers' results as the driver has them; `resolve` gives the values of what it fetches."""
    results = resolve([handle[0] for handle in handles])
    for result, (_, columns) in zip(results, handles, strict=True):
        if isinstance(result, DataProto) and result.stored is not None:
            result.stored = result.stored.with_contents({None: columns}.get)
    return results


def _mapped(call: Call, change: Callable[[Any], Any]) -> Call:
    args, kwargs = call
    return tuple(map(change, args)), {key: change(value) for key, value in kwargs.items()}
