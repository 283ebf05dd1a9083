"""The results of one call on all ranks, or the error that says most: who died, on which node, of what.

    refs of the ranks -> wait for any -> all there: their values
                                      -> an error:  wait a little for a death that explains it -> raise

A rank that dies leaves the others in a collective that never ends. They hold nothing up here: the first rank
that is known to be gone ends the call, and whoever gets the error shuts the group down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from verl.single_controller.base.worker_group import (
    PEER_GONE,
    ConnectionLostError,
    WorkerDiedError,
    WorkerFailedError,
)
from verl.single_controller.ray.deaths import ProcessPlace, describe_death, in_one_line

_SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
_SECONDS_TO_MISS_A_NODE = 40.0  # after an error of the network: Ray notices the loss of a node by its silence


def resolve_refs(
    refs: list[Any], who: Sequence[str], method: str, places: Sequence[ProcessPlace] = ()
) -> list[Any]:
    """Return the values of one call's object references; raise at the first error of any rank.

    Args:
        refs: the references of rank 0, 1, ...
        who: the ranks in words, such as "trainer-0", for messages.
        method: name of the method, for messages.
        places: where the ranks live, as far as that is known.
    """
    pending = list(refs)
    values = {}
    errors = dict[Any, Exception]()

    def wait(timeout: float | None) -> list[Any]:
        """Fetch what comes next; return the references that are still out."""
        if not ray.is_initialized():  # Ray would start again for a thread that outlives the run
            raise RuntimeError("Ray has been shut down.")
        ready, still_out = ray.wait(pending, num_returns=1, timeout=timeout)
        for ref in ready:
            try:
                values[ref] = ray.get(ref)
            except Exception as error:  # whatever a worker's method may raise; raised again below
                errors[ref] = error
        return still_out

    while pending and not errors:
        pending = wait(None)
    if not errors:
        return [values[ref] for ref in refs]
    lost_peer = any(_peer_gone(error) for error in errors.values())
    end = time.monotonic() + (_SECONDS_TO_MISS_A_NODE if lost_peer else _SECONDS_FOR_OTHER_RANKS)
    while pending and not any(map(_is_death, errors.values())) and (remaining := end - time.monotonic()) > 0:
        pending = wait(remaining)
    rank = min((refs.index(ref) for ref in errors), key=lambda r: not _is_death(errors[refs[r]]))
    error = errors[refs[rank]]
    if _is_death(error) and not isinstance(error, RayTaskError):
        place = places[rank] if rank < len(places) else None
        raise WorkerDiedError(describe_death(who[rank], place, method, error)) from error
    if not isinstance(error, RayTaskError) or not isinstance(error.cause, Exception):
        raise error
    cause = error.cause
    failed = WorkerFailedError(f"{who[rank]} failed in {method}:\n{error}")
    if isinstance(cause, WorkerDiedError):
        raise cause
    if _peer_gone(error):
        raise ConnectionLostError(
            f"{who[rank]} lost its connection to another rank during {method}, and none was seen to die: "
            f"{in_one_line(cause)}"
        ) from failed
    if isinstance(cause, ObjectLostError):
        raise WorkerDiedError(
            f"{who[rank]} can't run {method}: rows that it needs lay with a process or on a node that is "
            f"gone: {in_one_line(cause)}"
        ) from error
    raise cause from failed


def _is_death(error: Exception) -> bool:
    if isinstance(error, RayTaskError):  # the death of the rank whose future a worker waited for
        return isinstance(error.cause, WorkerDiedError)
    return isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError | ObjectLostError)


def _peer_gone(error: Exception) -> bool:
    return isinstance(error, RayTaskError) and PEER_GONE.search(str(error.cause)) is not None
